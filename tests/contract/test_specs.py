# SPDX-License-Identifier: Apache-2.0
"""The specs without an engine: sizing, one region for all, clean failure."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tier import make_config
from tests.support.transfer import Shape, kv_caches
from vllm_tiered_offload.config import ConfigError
from vllm_tiered_offload.region.shared_region import RegionError
from vllm_tiered_offload.spec.cpu import AlignedCPUOffloadingSpec
from vllm_tiered_offload.spec.tiering import AlignedTieringOffloadingSpec

PAGE = mmap.PAGESIZE
ODD = 9000  # bytes a worker's block; no multiple of anything


class Closing:
    """Specs whose workers and managers are shut down at the end of the test."""

    def __init__(self) -> None:
        self.specs: list[Any] = []

    def __call__(self, spec: Any) -> Any:
        self.specs.append(spec)
        return spec

    def close(self) -> None:
        for spec in self.specs:
            if spec._manager is not None:
                spec._manager.shutdown()
            if spec._worker is not None:
                spec._worker.shutdown()


@pytest.fixture
def closing() -> Iterator[Closing]:
    keep = Closing()
    yield keep
    keep.close()


def caches() -> Any:
    return kv_caches(Shape(pages=(ODD,), groups=(((0, ODD),),)), blocks=4)


def disk(tmp_path: Path) -> dict[str, Any]:
    return {
        "type": "odirect_fs",
        "root_dir": str(tmp_path / "kv"),
        "max_bytes": "64MiB",
        "cache_namespace": "test",
    }


def test_the_class_variable_is_the_least_alignment() -> None:
    assert AlignedCPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT == 1
    assert AlignedTieringOffloadingSpec.BLOCK_SIZE_ALIGNMENT == PAGE


def test_a_tiering_chunk_is_padded_and_the_budget_still_holds() -> None:
    budget = 10 * 3 * ODD
    spec = AlignedTieringOffloadingSpec(
        make_config(page=ODD, world_size=3, cpu_bytes_to_use=budget)
    )
    assert spec.kv_bytes_per_chunk == -(-3 * ODD // PAGE) * PAGE
    assert spec.cpu_page_size_per_worker == ODD
    assert spec.num_chunks == budget // spec.kv_bytes_per_chunk == 9


def test_a_cpu_only_chunk_is_not_padded() -> None:
    config = make_config(page=ODD)
    extra = {k: v for k, v in config.extra_config.items() if k != "secondary_tiers"}
    spec = AlignedCPUOffloadingSpec(dataclasses.replace(config, extra_config=extra))
    assert (spec.kv_bytes_per_chunk, spec.num_chunks) == (ODD, 16)


@pytest.mark.parametrize("raised", [8192, "2MiB"])
def test_the_key_raises_the_alignment(raised: object) -> None:
    config = make_config(page=ODD, block_size_alignment=raised, cpu_bytes_to_use="8MiB")
    spec = AlignedTieringOffloadingSpec(config)
    assert spec.kv_bytes_per_chunk == (
        2**21 if raised == "2MiB" else 12288 // 8192 * 8192 + 8192
    )


def test_a_subclass_raises_the_alignment() -> None:
    class Huge(AlignedTieringOffloadingSpec):
        BLOCK_SIZE_ALIGNMENT = 2**21

    assert Huge(make_config(page=ODD, cpu_bytes_to_use="8MiB")).kv_bytes_per_chunk == 2**21


def test_a_budget_below_one_chunk_says_how_large_a_chunk_is() -> None:
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: 4096 bytes .* 12288 bytes"):
        AlignedTieringOffloadingSpec(make_config(page=ODD, cpu_bytes_to_use=4096))


@pytest.mark.parametrize("shape", [{"page": 0}, {"world_size": 0}])
def test_nothing_to_offload_is_an_empty_pool(shape: dict[str, int], tmp_path: Path) -> None:
    config = make_config([disk(tmp_path)], cpu_bytes_to_use=2**20, **shape)
    spec = AlignedTieringOffloadingSpec(config)
    assert spec.num_chunks == 0
    assert spec.get_manager() is spec.get_manager()
    assert not (tmp_path / "kv" / "segments").exists()


def test_worker_and_scheduler_map_the_same_bytes(tmp_path: Path, closing: Closing) -> None:
    config = make_config([disk(tmp_path)], page=ODD)
    worker_spec = closing(AlignedTieringOffloadingSpec(config))
    worker_spec.get_worker(caches())
    assert worker_spec.get_worker(caches()) is worker_spec._worker
    spec = closing(AlignedTieringOffloadingSpec(config))
    manager = spec.get_manager()
    assert spec.get_manager() is manager
    rows = np.frombuffer(manager.primary_tier.get_kv_memoryview().cast("B"), np.uint8)
    assert rows.size == spec.num_chunks * spec.kv_bytes_per_chunk
    assert rows.ctypes.data % PAGE == 0


def test_ranks_that_have_not_joined_are_named(tmp_path: Path, closing: Closing) -> None:
    settings = {"page": ODD, "world_size": 3, "region_join_timeout": 1}
    config = make_config([disk(tmp_path)], engine_id="three", rank=1, **settings)
    closing(AlignedTieringOffloadingSpec(config)).get_worker(caches())
    scheduler = closing(AlignedTieringOffloadingSpec(config))
    with pytest.raises(RegionError, match=r"ranks 0, 2 of 3"):
        scheduler.get_manager()
    assert scheduler._manager is None


def test_a_tier_that_cannot_start_leaves_nothing_behind(
    tmp_path: Path, closing: Closing
) -> None:
    good = disk(tmp_path)
    bad = {"type": "NoSuchTier", "module_path": "tests.support.tier"}
    config = make_config([good, bad], page=ODD, engine_id="bad tier")
    closing(AlignedTieringOffloadingSpec(config)).get_worker(caches())
    spec = AlignedTieringOffloadingSpec(config)
    with pytest.raises(AttributeError):
        spec.get_manager()
    # The first tier let go of its directory: another engine can have it.
    again = make_config([good], page=ODD, engine_id="good tier")
    closing(AlignedTieringOffloadingSpec(again)).get_worker(caches())
    assert closing(AlignedTieringOffloadingSpec(again)).get_manager() is not None


def test_what_vllms_stock_spec_declares_is_declared(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    raw = {"cpu_bytes_to_use": "1GiB", "secondary_tiers": [disk(tmp_path)]}
    ours = AlignedTieringOffloadingSpec.build_metric_definitions(raw)
    theirs = TieringOffloadingSpec.build_metric_definitions({**raw, "secondary_tiers": []})
    assert set(theirs) <= set(ours)
