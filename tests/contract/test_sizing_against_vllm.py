# SPDX-License-Identifier: Apache-2.0
"""The pool's arithmetic is vLLM's: both are given the same engines and must agree."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from vllm_tiered_offload.spec.sizing import size_pool

config_module = pytest.importorskip("vllm.v1.kv_offload.config")
spec_module = pytest.importorskip("vllm.v1.kv_offload.tiering.spec")


def make(cls: type, **values: Any) -> Any:
    """`cls` with those of `values` that this vLLM's dataclass has."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in names})


def offloading_config(
    budget: int, block: int, world: int, blocks_per_chunk: int, *, replicated: bool = False
) -> Any:
    return make(
        config_module.OffloadingConfig,
        groups=(
            make(
                config_module.OffloadingGroupConfig,
                tokens_per_block=16,
                layer_names=("layer.0",),
                group_id=0,
            ),
        ),
        worker_kv_bytes_per_block=block,
        enable_kv_cache_events=False,
        engine_id="sizing",
        extra_config={"cpu_bytes_to_use": budget, "secondary_tiers": []},
        model=make(
            config_module.OffloadingModelConfig,
            name="model",
            dtype="bfloat16",
            max_model_len=4096,
        ),
        cache=make(
            config_module.OffloadingCacheConfig,
            tokens_per_hash=16,
            blocks_per_chunk=blocks_per_chunk,
        ),
        parallel=make(
            config_module.OffloadingParallelConfig,
            rank=0,
            world_size=world,
            tp_size=world,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        replicated_layout=replicated,
    )


def with_alignment(alignment: int) -> Any:
    """vLLM's spec, its platform question answered so that a replicated layout counts."""

    class Spec(spec_module.TieringOffloadingSpec):  # type: ignore[misc, name-defined]
        BLOCK_SIZE_ALIGNMENT = alignment

        def _uses_shared_region(self) -> bool:
            return True

    return Spec


@pytest.mark.parametrize(
    ("block", "world", "blocks_per_chunk", "alignment", "replicated"),
    [
        *itertools.product(
            (1, 4096, 9_000, 3_098_112), (1, 2, 8), (1, 3), (1, 4096, 2 << 20), (False, True)
        ),
        (0, 2, 1, 4096, False),
        (4096, 0, 1, 4096, False),
    ],
)
def test_agrees_with_vllm(block, world, blocks_per_chunk, alignment, replicated):
    budget = (1 << 30) + 12_345
    vllm = with_alignment(alignment)(
        offloading_config(budget, block, world, blocks_per_chunk, replicated=replicated)
    )
    ours = size_pool(budget, block, world, blocks_per_chunk, alignment, replicated=replicated)
    assert ours.num_chunks == vllm.num_chunks
    assert ours.kv_bytes_per_chunk == vllm.kv_bytes_per_chunk
    assert ours.page_bytes_per_worker == vllm.cpu_page_size_per_worker


def test_vllm_makes_an_empty_pool_where_we_refuse():
    """The reason for the check: vLLM starts with no chunk and caches nothing, silently."""
    assert with_alignment(4096)(offloading_config(4095, 4096, 1, 1)).num_chunks == 0
    with pytest.raises(ValueError, match="takes 4096 bytes"):
        size_pool(4095, 4096, 1, alignment=4096)
