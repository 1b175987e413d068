# SPDX-License-Identifier: Apache-2.0
"""Real transfers between a device's KV cache and the region, checked and timed.

On "cuda" by vLLM's own worker, on "cpu" by the host worker.
"""

from __future__ import annotations

import contextlib
import mmap
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.support.transfer import (
    CanonicalKVCaches,
    Shape,
    expected_load,
    expected_store,
    kv_caches,
    random_transfer,
)
from vllm_tiered_offload.region.shared_region import RegionSettings, SharedOffloadRegion

BLOCKS, CHUNKS = 40, 24
# A page of 100 bytes is no multiple of 8: vLLM takes another copy path for it.
LAYERS = Shape(pages=(4096, 4096, 100), groups=(((0, 4096), (1, 4096), (2, 100)),))
SMALL = Shape(pages=(64, 64), groups=(((0, 64), (1, 64)),))
TWO_GROUPS = Shape(pages=(512, 512), groups=(((0, 512), (1, 480)), ((0, 256), (1, 512))))
SHAPES = {"layers": LAYERS, "small pages": SMALL, "two groups": TWO_GROUPS}


def page_multiple(size: int, page: int = mmap.PAGESIZE) -> int:
    return -(-size // page) * page


def open_region(
    chunks: int, slot: int, settings: RegionSettings | None = None, row: int = 0
) -> SharedOffloadRegion:
    """A region of one worker, with nobody else to wait for."""
    return SharedOffloadRegion(
        f"check-{uuid.uuid4()}", chunks, 0, row or page_multiple(slot), slot,
        settings=settings, scheduler_joins=False,
    )  # fmt: skip


def vllms_region(chunks: int, slot: int) -> Any:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion as VllmRegion

    return VllmRegion(f"check-{uuid.uuid4()}", chunks, 0, page_multiple(slot), slot)


def make_worker(
    device: str, caches: CanonicalKVCaches, factor: int, chunks: int, region: Any
) -> OffloadingWorker:
    if device == "cpu":
        from vllm_tiered_offload.worker.host import HostOffloadingWorker

        return HostOffloadingWorker(caches, factor, chunks, region)
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

    return CPUOffloadingWorker(caches, factor, chunks, region)


@contextlib.contextmanager
def working(
    device: str, caches: CanonicalKVCaches, factor: int, chunks: int, region: Any
) -> Iterator[OffloadingWorker]:
    """A worker that is shut down at the end, and its region with it."""
    try:
        worker = make_worker(device, caches, factor, chunks, region)
    except BaseException:
        region.cleanup()
        raise
    try:
        yield worker
    finally:
        worker.shutdown()


def caches_on(device: str, shape: Shape, blocks: int) -> CanonicalKVCaches:
    caches = kv_caches(shape, blocks)
    for cache in caches.tensors:
        cache.tensor = cache.tensor.to(device)
    return caches


def check_transfer(
    device: str, shape: Shape, factor: int, settings: RegionSettings | None = None
) -> dict[str, object]:
    """Store and load with partial first and last chunks; all bytes compared both ways.

    Returns the region's description and whether it was pinned. Raises AssertionError.
    """
    slot = shape.block_bytes * factor
    caches = caches_on(device, shape, BLOCKS)
    region = open_region(CHUNKS, slot, settings)
    groups = len(shape.groups)
    transfer = random_transfer(
        np.random.default_rng(factor), [9] * groups, [5] * groups, factor,
        blocks=BLOCKS, chunks=CHUNKS,
    )  # fmt: skip
    chunks = CPULoadStoreSpec(list(transfer.chunks))
    with working(device, caches, factor, CHUNKS, region) as worker:
        pool = region.base_tensor.view(CHUNKS, -1)
        expected = pool.clone()
        own = expected[:, :slot]
        own[:] = expected_store(shape, caches, pool[:, :slot], transfer, factor)
        _run(worker, 1, worker.submit_store, transfer.spec, chunks)
        assert torch.equal(pool, expected), "stored bytes differ"
        for cache in caches.tensors:
            cache.tensor.random_(-128, 128)
        after = expected_load(shape, caches, pool, transfer, factor)
        _run(worker, 2, worker.submit_load, chunks, transfer.spec)
        for cache, wanted in zip(caches.tensors, after, strict=True):
            assert torch.equal(cache.tensor, wanted), "loaded bytes differ"
        assert torch.equal(pool, expected), "a load changed the pool"
        facts = region.describe() | {"pinned": region.is_pinned}
        del pool
    return facts


def _run(worker: OffloadingWorker, job: int, submit: Callable[..., bool], *specs: Any) -> float:
    """Seconds that one transfer took, by the worker's own account."""
    assert submit(job, *specs)
    worker.wait({job})
    deadline = time.monotonic() + 30
    while not (results := worker.get_finished()):
        assert time.monotonic() < deadline, f"transfer {job} was never reported"
    assert [(r.job_id, r.success) for r in results] == [(job, True)]
    return results[0].transfer_time or 0.0


def rates(
    device: str, region: Any, layers: int, page: int, blocks: int, repeats: int = 7
) -> tuple[float, float, bool]:
    """Median GB/s of a store and a load of random blocks, and whether it was pinned."""
    shape = Shape((page,) * layers, (tuple((t, page) for t in range(layers)),))
    caches = caches_on(device, shape, blocks)
    rng = np.random.default_rng(0)
    spec = GPULoadStoreSpec(rng.permutation(blocks).tolist(), [blocks], [0])
    chunks = CPULoadStoreSpec(rng.permutation(blocks).tolist())
    size = blocks * page * layers
    with working(device, caches, 1, blocks, region) as worker:
        pinned = region.is_pinned
        seconds: dict[str, list[float]] = {"store": [], "load": []}
        for i in range(repeats):
            seconds["store"].append(_run(worker, 2 * i, worker.submit_store, spec, chunks))
            seconds["load"].append(_run(worker, 2 * i + 1, worker.submit_load, chunks, spec))
    store, load = (size / statistics.median(s[1:]) / 1e9 for s in seconds.values())
    return store, load, pinned
