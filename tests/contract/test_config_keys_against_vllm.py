# SPDX-License-Identifier: Apache-2.0
"""Every key that vLLM's offloading code reads is one that our settings let through."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_tiered_offload.config import FsTierSettings, SpecSettings, transfer

pytest.importorskip("vllm.v1.kv_offload.base")

_EXTRA = re.compile(r"extra_config(?:\.get\(|\[)\s*\"(\w+)\"")
_TIER = re.compile(r"\b(?:tier_config|tier_cfg|config)\.(?:get|pop)\(\s*\"(\w+)\"")


def sources() -> Iterator[Path]:
    """vLLM's offloading connector, its specs and tier factory; not its own tiers."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    offload = root / "v1" / "kv_offload"
    connector = root / "distributed" / "kv_transfer" / "kv_connector" / "v1"
    yield from offload.glob("*.py")
    yield from (offload / "cpu").rglob("*.py")
    yield from (offload / "tiering").glob("*.py")
    yield from (connector / "offloading").rglob("*.py")
    yield connector / "offloading_connector.py"


def test_keys_of_the_extra_config():
    read = {key for path in sources() for key in _EXTRA.findall(path.read_text())}
    assert {"cpu_bytes_to_use", "spec_name", "blocks_per_chunk", "secondary_tiers"} <= read
    assert read <= set(SpecSettings.model_fields)


def test_keys_of_a_tier():
    factory = next(path for path in sources() if path.parts[-2:] == ("tiering", "factory.py"))
    read = set(_TIER.findall(factory.read_text()))
    assert {"type", "module_path"} <= read
    assert read <= set(FsTierSettings.model_fields)


def test_names_that_vllm_knows():
    from vllm.config import KVTransferConfig
    from vllm.config.kv_transfer import KVRole
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    fields = {field.name for field in dataclasses.fields(KVTransferConfig)}
    assert set(transfer._FIELDS) <= fields
    assert fields <= {*transfer._FIELDS, *transfer._FIELDS_BEFORE_0_32}
    assert set(typing.get_args(KVRole)) == set(transfer._ROLES)
    assert set(OffloadingSpecFactory._registry) <= set(transfer._SPECS)
    assert set(SecondaryTierFactory._registry) <= set(transfer._TIER_TYPES)
