# SPDX-License-Identifier: Apache-2.0
"""vLLM's own GPU transfer worker over our region, its CUDA calls played on the CPU.

Pinning, views, pointer arithmetic and release are vLLM's code; the region is ours.
"""

from __future__ import annotations

import mmap
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from tests.support import fake_cuda
from tests.support.transfer import (
    Shape,
    expected_load,
    expected_store,
    kv_caches,
    random_transfer,
)
from vllm_tiered_offload.region.shared_region import SharedOffloadRegion

BLOCKS, CHUNKS = 40, 24
LAYERS = Shape(pages=(96, 96, 40), groups=(((0, 96), (1, 96), (2, 40)),))
SHARED = Shape(pages=(96, 96), groups=(((0, 96), (1, 80)), ((0, 64), (1, 72))))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.Pinned:
    return fake_cuda.play(monkeypatch)


def page_multiple(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def open_region(slot: int, chunks: int = CHUNKS) -> SharedOffloadRegion:
    return SharedOffloadRegion(
        f"gpu-{uuid.uuid4()}", chunks, 0, page_multiple(slot), slot, scheduler_joins=False
    )


@pytest.fixture
def region() -> Iterator[SharedOffloadRegion]:
    region = open_region(LAYERS.block_bytes * 8)
    yield region
    region.cleanup()


@pytest.mark.parametrize("shape", [LAYERS, SHARED], ids=["layers", "groups share tensors"])
@pytest.mark.parametrize("factor", [1, 2, 8])
def test_vllms_worker_moves_the_right_bytes(
    shape: Shape, factor: int, pinned: fake_cuda.Pinned
) -> None:
    slot = shape.block_bytes * factor
    region = open_region(slot)
    caches = fake_cuda.on_gpu(kv_caches(shape, BLOCKS))
    worker = CPUOffloadingWorker(caches, factor, CHUNKS, region)
    assert region.is_pinned
    address = region._base.data_ptr()
    assert dict(pinned) == {address: region.total_size_bytes}

    groups = len(shape.groups)
    transfer = random_transfer(
        np.random.default_rng(factor), [9] * groups, [5] * groups, factor,
        blocks=BLOCKS, chunks=CHUNKS,
    )  # fmt: skip
    chunks = CPULoadStoreSpec(list(transfer.chunks))
    pool = torch.frombuffer(region.create_kv_memoryview(), dtype=torch.int8)
    pool = pool.view(CHUNKS, -1)
    expected = torch.zeros_like(pool)
    expected[:, :slot] = expected_store(shape, caches, pool[:, :slot], transfer, factor)
    assert worker.submit_store(1, transfer.spec, chunks)
    assert torch.equal(pool, expected)

    for cache in caches.tensors:
        cache.tensor.random_(-128, 128)
    after = expected_load(shape, caches, pool, transfer, factor)
    assert worker.submit_load(2, chunks, transfer.spec)
    assert all(torch.equal(t.tensor, a) for t, a in zip(caches.tensors, after, strict=True))
    assert [(r.job_id, r.success) for r in worker.get_finished()] == [(1, True), (2, True)]

    del pool
    worker.shutdown()
    assert pinned == {}
    assert region._base is None


def test_the_region_is_registered_in_parts_that_end_on_rows(
    region: SharedOffloadRegion, pinned: fake_cuda.Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES"):
        pytest.skip("this vLLM registers the region as a whole")
    row = region._row_stride
    monkeypatch.setattr(gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES", 5 * row + 17)
    gpu_worker.pin_mmap_region(region)
    base = region._base.data_ptr()
    assert dict(pinned) == {
        base + i * row: min(5, CHUNKS - i) * row for i in range(0, CHUNKS, 5)
    }
    region.cleanup()
    assert pinned == {}


def test_a_registration_that_fails_midway_is_rolled_back(
    region: SharedOffloadRegion, pinned: fake_cuda.Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM goes on unpinned; the region must not unregister what is not registered."""
    if hasattr(gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES"):
        chunk = 5 * region._row_stride
        monkeypatch.setattr(gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES", chunk)
    pinned.fail_at = 3 if hasattr(gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES") else 1
    gpu_worker.pin_mmap_region(region)
    assert pinned.calls == pinned.fail_at
    assert pinned == {}
    assert not region.is_pinned
    region.cleanup()


def test_only_this_workers_slots_are_registered(pinned: fake_cuda.Pinned) -> None:
    """vLLM 0.33 registers a rank's own slots when that leaves out enough of a row."""
    import inspect

    if "worker_slot_only" not in inspect.signature(gpu_worker.pin_mmap_region).parameters:
        pytest.skip("this vLLM registers the region as a whole")
    slot = (1 << 20) + 512
    row = page_multiple(8 * slot)
    region = SharedOffloadRegion(
        f"gpu-{uuid.uuid4()}", 3, 3, row, slot, joining_rank=0, scheduler_joins=False
    )
    gpu_worker.pin_mmap_region(region, worker_slot_only=True)
    base = region._base.data_ptr()
    assert len(pinned) == 3
    for chunk, (address, size) in enumerate(sorted(pinned.items())):
        start = chunk * row + 3 * slot
        assert address - base <= start
        assert start + slot <= address - base + size
        assert size < slot + 2 * mmap.PAGESIZE
        assert address % mmap.PAGESIZE == 0
    region.cleanup()
    assert pinned == {}


def test_canonical_views_start_at_the_row_and_follow_each_other(
    region: SharedOffloadRegion,
) -> None:
    first = region.create_next_canonical_view(100)
    second = region.create_next_canonical_view(28)
    flat = region.create_kv_memoryview()
    first[2, 0], second[2, 27] = 5, 7
    assert (flat[2, 0], flat[2, 127]) == (5, 7)
    assert first.stride() == second.stride() == (region._row_stride, 1)
    del first, second, flat


def test_a_constructor_that_fails_leaves_the_region_to_its_owner(
    region: SharedOffloadRegion, pinned: fake_cuda.Pinned
) -> None:
    """vLLM's worker owns the region only once it exists; the spec cleans up before that."""
    caches = kv_caches(LAYERS, BLOCKS)  # not on a GPU: vLLM's worker refuses
    with pytest.raises(AssertionError):
        CPUOffloadingWorker(caches, 8, CHUNKS, region)
    assert region._base is not None
    region.cleanup()
    assert pinned == {}
