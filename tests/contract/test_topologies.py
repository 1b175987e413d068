# SPDX-License-Identifier: Apache-2.0
"""Kinds of parallelism, from vLLM's configuration to namespaces that are kept apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from vllm_tiered_offload.fs_tier.identity import Layout, layout_of, resolve_namespace

CHUNK = 1 << 16


def layout(model: Path, *, canonical: bool = False, **sizes: int) -> Layout:
    """What a spec of an engine with these sizes hands to the tier."""
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"canonical_layout": canonical},
    )
    config = EngineArgs(
        model=str(model), dtype="bfloat16", kv_transfer_config=transfer
    ).create_engine_config()
    parallel = config.parallel_config
    for name, size in sizes.items():
        setattr(parallel, name, size)
    parallel.world_size = (
        parallel.tensor_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.prefill_context_parallel_size
    )
    heads = max(1, 2 // parallel.tensor_parallel_size)
    spec = FullAttentionSpec(
        block_size=128, num_kv_heads=heads, head_size=32, dtype=torch.bfloat16
    )
    caches = KVCacheConfig(
        num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)]
    )
    return layout_of(build_offloading_config(config, caches), CHUNK)


TOPOLOGIES: list[dict[str, int]] = [
    {},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {"prefill_context_parallel_size": 2},
]


def digits(found: Layout) -> str:
    return resolve_namespace(None, found, cache_namespace="same").namespace.fingerprint


@pytest.mark.parametrize("canonical", [False, True])
def test_each_topology_has_its_own_namespace(tiny_llama: Path, canonical: bool) -> None:
    # Without the workers' certificates nothing is portable, whatever vLLM claims.
    layouts = [layout(tiny_llama, canonical=canonical, **sizes) for sizes in TOPOLOGIES]
    assert len({digits(found) for found in layouts}) == len(TOPOLOGIES)


def test_sizes_arrive(tiny_llama: Path) -> None:
    found = layout(tiny_llama, tensor_parallel_size=2, decode_context_parallel_size=2)
    sizes: Any = (found.world_size, found.tp_size, found.pp_size, found.dcp_size)
    assert sizes == (2, 2, 1, 2)


@pytest.mark.parametrize("sizes", TOPOLOGIES, ids=str)
def test_portable_is_claimed_for_tensor_parallelism_at_most(
    tiny_llama: Path, sizes: dict[str, int]
) -> None:
    assert not layout(tiny_llama, **sizes).portable
    claimed = layout(tiny_llama, canonical=True, **sizes).portable
    context = sizes.keys() & {"decode_context_parallel_size", "prefill_context_parallel_size"}
    if context:
        assert not claimed
    elif "pipeline_parallel_size" not in sizes:
        assert claimed
