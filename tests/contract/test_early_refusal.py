# SPDX-License-Identifier: Apache-2.0
"""With our connector's name a bad key stops vLLM before it has loaded anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_tiered_offload.config import ConfigError
from vllm_tiered_offload.connector import TieredOffloadingConnector
from vllm_tiered_offload.plugin import CONNECTOR, CPU_SPEC

POOL = {"cpu_bytes_to_use": "1GiB"}


@pytest.mark.parametrize(
    "extra",
    [
        POOL,
        {},
        {**POOL, "spec_name": CPU_SPEC},
        {**POOL, "secondary_tiers": [{"type": "odirect_fs", "root_dir": "/no/such/disk"}]},
        {"spec_name": "SomebodyElses", "spec_module_path": "a.b", "anything": 1},
    ],
)
def test_a_good_configuration_passes(extra: dict[str, Any]) -> None:
    before = dict(extra)
    assert TieredOffloadingConnector.requires_piecewise_for_cudagraph(extra) is False
    assert extra == before


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use: 0 is out of range"),
        ({**POOL, "max_byte": 1}, "max_byte: is not a known key"),
        (
            {**POOL, "spec_name": CPU_SPEC, "secondary_tiers": []},
            "secondary_tiers: is not used",
        ),
    ],
)
def test_a_bad_one_is_refused(extra: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        TieredOffloadingConnector.requires_piecewise_for_cudagraph(extra)


def test_vllm_asks_while_it_makes_its_configuration(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, where graphs are used unless they are switched off.
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda _: True)
    arguments = EngineArgs(
        model=str(tiny_llama),
        compilation_config={"cudagraph_mode": "FULL"},
        kv_transfer_config=KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_role="kv_both",
            kv_connector_extra_config={**POOL, "pin_share": 7},
        ),
    )
    with pytest.raises(ValueError, match=r"pin_share: 7 is out of range; allowed: 0\.01 to 1"):
        arguments.create_engine_config()


def test_the_size_may_come_from_the_flag(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM asks the connector first and only then puts --kv-offloading-size into its keys.
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda _: True)
    arguments = EngineArgs(
        model=str(tiny_llama),
        compilation_config={"cudagraph_mode": "FULL"},
        kv_offloading_size=2.0,
        kv_transfer_config=KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_role="kv_both",
            kv_connector_extra_config={"spec_name": CPU_SPEC},
        ),
    )
    transfer = arguments.create_engine_config().kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector_extra_config["cpu_bytes_to_use"] == 2 << 30
