# SPDX-License-Identifier: Apache-2.0
"""Two ranks' host workers and a scheduler over one shared region, and vLLM's own region."""

from __future__ import annotations

import mmap
import uuid
from concurrent.futures import ThreadPoolExecutor

import torch
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import (
    SharedOffloadRegion as VllmRegion,
)

from tests.support.transfer import Shape, Transfer, expected_store, kv_caches
from vllm_tiered_offload.region.shared_region import SharedOffloadRegion
from vllm_tiered_offload.worker.host import HostOffloadingWorker

SHAPE = Shape(pages=(96, 64), groups=(((0, 80), (1, 64)),))
FACTOR, CHUNKS, BLOCKS, RANKS = 2, 9, 20, 2
SLOT = SHAPE.block_bytes * FACTOR
ROW = -(-SLOT * RANKS // mmap.PAGESIZE) * mmap.PAGESIZE
TRANSFER = Transfer(((3, 9, 2, 7, 5),), (1,), (4, 0, 8))
STORE = (TRANSFER.spec, CPULoadStoreSpec(list(TRANSFER.chunks)))


def test_each_rank_fills_its_slot_and_the_scheduler_sees_both(
    no_leftovers_in_shm: None,
) -> None:
    engine = f"host-{uuid.uuid4()}"

    def open_region(rank: int | None) -> SharedOffloadRegion:
        return SharedOffloadRegion(engine, CHUNKS, rank, ROW, SLOT, world_size=RANKS)

    with ThreadPoolExecutor(RANKS) as pool:
        regions = list(pool.map(open_region, range(RANKS)))
    scheduler = open_region(None)
    rows = torch.frombuffer(scheduler.create_kv_memoryview(), dtype=torch.int8)
    rows = rows.view(CHUNKS, ROW)
    expected = torch.zeros_like(rows)
    workers = []
    for rank, region in enumerate(regions):
        caches = kv_caches(SHAPE, BLOCKS, seed=rank)
        workers.append(HostOffloadingWorker(caches, FACTOR, CHUNKS, region))
        own = slice(rank * SLOT, (rank + 1) * SLOT)
        expected[:, own] = expected_store(SHAPE, caches, rows[:, own], TRANSFER, FACTOR)
    for worker in workers:
        worker.submit_store(1, *STORE)
    for worker in workers:
        worker.shutdown()
    assert [region._base for region in regions] == [None, None]
    assert torch.equal(rows, expected)
    del rows
    scheduler.cleanup()


def test_vllms_own_region_works_too(no_leftovers_in_shm: None) -> None:
    """Its interface is what the worker relies on, in every supported version."""
    region = VllmRegion(f"host-{uuid.uuid4()}", CHUNKS, 0, ROW, SLOT)
    rows = region._base.view(CHUNKS, ROW).clone()
    caches = kv_caches(SHAPE, BLOCKS)
    worker = HostOffloadingWorker(caches, FACTOR, CHUNKS, region)
    worker.submit_store(1, *STORE)
    worker.wait({1})
    after = region._base.view(CHUNKS, ROW).clone()
    rows[:, :SLOT] = expected_store(SHAPE, caches, rows[:, :SLOT], TRANSFER, FACTOR)
    assert torch.equal(after, rows)
    worker.shutdown()
