# SPDX-License-Identifier: Apache-2.0
"""The life of a transfer: order, one report each, waiting, failure, shutdown."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.support.transfer import PlainRegion, Shape, kv_caches
from vllm_tiered_offload.worker import copy
from vllm_tiered_offload.worker.host import HostOffloadingWorker
from vllm_tiered_offload.worker.plan import Copies

PAGE, BLOCKS, CHUNKS = 128, 16, 8
SHAPE = Shape(pages=(PAGE,), groups=(((0, PAGE),),))


class Gate:
    """Holds every copy of the chosen direction until it is opened; notes their threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.holds_stores = self.holds_loads = True
        self.threads: set[int] = set()
        self._copy = copy.run
        monkeypatch.setattr(copy, "run", self.run)

    def run(self, copies: Copies, store: bool) -> None:
        self.threads.add(threading.get_ident())
        if self.holds_stores if store else self.holds_loads:
            assert self.opened.wait(20)
        self._copy(copies, store)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


@pytest.fixture
def region() -> PlainRegion:
    return PlainRegion(CHUNKS, PAGE, PAGE)


@pytest.fixture
def caches():
    return kv_caches(SHAPE, BLOCKS)


@pytest.fixture
def worker(caches, region: PlainRegion) -> Iterator[HostOffloadingWorker]:
    worker = HostOffloadingWorker(caches, 1, CHUNKS, region)
    yield worker
    worker.shutdown()


def blocks(*ids: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(ids), [len(ids)], [0])


def chunks(*ids: int) -> CPULoadStoreSpec:
    return CPULoadStoreSpec(list(ids))


def reported(worker: HostOffloadingWorker) -> list[int]:
    return [result.job_id for result in worker.get_finished()]


def test_stores_and_loads_keep_their_order(caches, region, worker) -> None:
    """The last of many writers to one place wins, in both directions."""
    for job in range(200):
        worker.submit_store(job, blocks(job % BLOCKS), chunks(3))
    for job in range(200, 400):
        worker.submit_load(job, chunks(job % 3), blocks(15))
    worker.wait(set(range(400)))
    done = reported(worker)
    assert [job for job in done if job < 200] == list(range(200))
    assert [job for job in done if job >= 200] == list(range(200, 400))
    assert torch.equal(region.bytes[3], caches.tensors[0].tensor[199 % BLOCKS])
    assert torch.equal(caches.tensors[0].tensor[15], region.bytes[399 % 3])


def test_every_job_is_reported_exactly_once(worker) -> None:
    seen: list[int] = []
    for job in range(300):
        submit = worker.submit_store if job % 3 else worker.submit_load
        specs = (blocks(job % BLOCKS), chunks(job % CHUNKS))
        submit(job, *(specs if job % 3 else reversed(specs)))
        seen += reported(worker)
    worker.wait(set(range(300)))
    seen += reported(worker)
    assert sorted(seen) == list(range(300))
    assert reported(worker) == []


def test_copies_run_off_the_callers_thread(worker, gate) -> None:
    """Submitting returns while the copy is still held up."""
    worker.submit_store(1, blocks(1), chunks(1))
    assert reported(worker) == []
    gate.opened.set()
    worker.wait({1})
    assert threading.get_ident() not in gate.threads


def test_waiting_for_unknown_and_reported_jobs_returns(worker, gate) -> None:
    """Ranks that do not write are asked to wait for jobs they never saw."""
    gate.holds_stores = False
    worker.submit_load(1, chunks(1), blocks(1))
    worker.wait({7, 8})
    worker.wait(set())
    worker.submit_store(2, blocks(2), chunks(2))
    worker.wait({2, 99})
    assert reported(worker) == [2]
    worker.wait({2})
    gate.opened.set()
    worker.wait({1})
    assert reported(worker) == [1]


def test_wait_returns_only_after_the_bytes_have_landed(caches, region, worker, gate) -> None:
    worker.submit_store(1, blocks(1), chunks(1))
    worker.submit_store(2, blocks(2), chunks(2))
    returned = threading.Event()

    def wait() -> None:
        worker.wait({2})
        returned.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not returned.wait(0.1)
    gate.opened.set()
    waiter.join(20)
    assert returned.is_set()
    assert torch.equal(region.bytes[2], caches.tensors[0].tensor[2])


def test_an_expedited_load_overtakes_normal_ones(caches, region, worker, gate) -> None:
    """vLLM waits for it within the step, while normal loads may be queued for seconds."""
    worker.submit_load(1, chunks(1), blocks(1))
    worker.submit_load(2, chunks(2), blocks(2))
    # The gate holds the first load only once it is running.
    while not gate.threads:
        pass
    gate.holds_loads = False
    worker.submit_load(3, chunks(3), blocks(3), expedited=True)
    worker.wait({3})
    assert reported(worker) == [3]
    assert torch.equal(caches.tensors[0].tensor[3], region.bytes[3])
    gate.opened.set()
    worker.wait({1, 2})
    assert reported(worker) == [1, 2]


def test_a_store_does_not_wait_for_loads(worker, gate) -> None:
    gate.holds_stores = False
    worker.submit_load(1, chunks(1), blocks(1))
    worker.submit_store(2, blocks(2), chunks(2))
    worker.wait({2})
    assert reported(worker) == [2]


def test_shutdown_finishes_what_was_submitted(caches, region, gate) -> None:
    worker = HostOffloadingWorker(caches, 1, CHUNKS, region)
    for job in range(CHUNKS):
        worker.submit_store(job, blocks(job), chunks(job))
    threading.Timer(0.05, gate.opened.set).start()
    worker.shutdown()
    assert region.cleanups == 1
    assert torch.equal(region.bytes, caches.tensors[0].tensor[:CHUNKS])
    assert reported(worker) == list(range(CHUNKS))
    worker.shutdown()
    assert region.cleanups == 1
    with pytest.raises(RuntimeError, match="after shutdown"):
        worker.submit_store(9, blocks(1), chunks(1))
    worker.wait({9})
    assert not [t for t in threading.enumerate() if t.ident in gate.threads]


class LostRegion(PlainRegion):
    """A mapping whose pages can be taken away, as by a peer's truncation."""

    def __init__(self) -> None:
        super().__init__(1, 1, 1)
        self.map = mmap.mmap(-1, 1 << 16)
        rows = torch.frombuffer(self.map, dtype=torch.int8)
        self.bytes = rows[: CHUNKS * PAGE].view(CHUNKS, PAGE)
        self.end = PAGE

    def lose(self) -> None:
        libc, address = (
            ctypes.CDLL(None, use_errno=True),
            ctypes.c_void_p(self.bytes.data_ptr()),
        )
        assert libc.mprotect(address, ctypes.c_size_t(1 << 16), 0) == 0


@pytest.mark.skipif(not copy.vector_copy_works(), reason="memmove would end the process")
def test_a_copy_that_fails_raises_with_its_cause(
    caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asserts success: raising is the only way to say that a transfer failed."""
    monkeypatch.setattr(copy, "PATIENCE", -1.0)
    region = LostRegion()
    worker = HostOffloadingWorker(caches, 1, CHUNKS, region)
    worker.submit_store(1, blocks(1), chunks(1))
    worker.wait({1})
    assert reported(worker) == [1]
    region.lose()
    worker.submit_load(2, chunks(1), blocks(1))
    with pytest.raises(RuntimeError, match="KV transfer") as caught:
        worker.wait({2})
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.strerror == "copied -1 of 128 bytes: Bad address"
    # Nothing waits for ever, nothing is reported as done, and the region is released.
    worker.submit_store(3, blocks(1), chunks(1))
    for call in (worker.get_finished, lambda: worker.wait({3})):
        with pytest.raises(RuntimeError, match="KV transfer"):
            call()
    worker.shutdown()
    assert region.cleanups == 1


def connector_worker(worker: HostOffloadingWorker, rank: int) -> OffloadingConnectorWorker:
    """vLLM's own connector over our worker, in a replicated layout of several ranks."""
    config = SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=rank))
    spec = SimpleNamespace(
        replicated_layout=True, config=config, get_worker=lambda caches: worker
    )
    connector = OffloadingConnectorWorker(spec, None, None)
    connector._init_worker(None)
    return connector


def metadata(loads=(), stores=(), flush=None) -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata(dict(loads), dict(stores), flush)


@pytest.mark.parametrize("rank", [0, 1])
def test_vllms_connector_in_a_replicated_layout(caches, region, worker, rank: int) -> None:
    """Rank 0 writes the one copy; the others acknowledge at once, and all of them load."""
    before = region.bytes.clone()
    connector = connector_worker(worker, rank)
    connector.prepare_store_kv(metadata(stores={1: TransferJob("r", blocks(1), chunks(1))}))
    flushed = metadata(stores={2: TransferJob("r", blocks(2), chunks(2))}, flush={1, 2})
    connector.handle_preemptions(flushed)
    changed = [i for i in range(CHUNKS) if not torch.equal(region.bytes[i], before[i])]
    assert changed == ([1, 2] if rank == 0 else [])
    load = metadata(loads={3: TransferJob("r", chunks(4), blocks(9))})
    connector.start_kv_transfers(load)
    worker.wait({3})
    assert connector.get_finished(set()) == (set(), {"r"})
    assert torch.equal(caches.tensors[0].tensor[9], region.bytes[4])
    meta = connector.build_connector_worker_meta()
    assert meta.completed_jobs == {1: 1, 2: 1, 3: 1}
    connector.shutdown()
    assert region.cleanups == 1
