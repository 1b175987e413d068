# SPDX-License-Identifier: Apache-2.0
"""The transfer worker for vLLM's CPU platform, where KV cache and pool are both host memory."""

from __future__ import annotations

import threading
import time

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from vllm_tiered_offload.worker import copy, memory, plan
from vllm_tiered_offload.worker.lane import Lane

logger = init_logger("vllm.tiered_offload.worker")


class HostOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks to and from the pool, off the engine's thread.

    Stores, loads and expedited loads are a FIFO each. Every job comes out of
    `get_finished` exactly once, always as a success: vLLM has no path for a failed
    transfer, so a copy that cannot be done raises out of `get_finished` and `wait`.

    Args:
        kv_caches: vLLM's KV cache tensors, on the CPU.
        blocks_per_chunk: blocks side by side in one row of the pool.
        num_chunks: rows of the pool.
        region: the shared pool, owned and released by the worker once this
            constructor has returned; None keeps the pool in plain tensors.
        canonical_layout: rows are laid out as the references' mappings say.

    Raises ValueError for tensors or references that cannot be copied.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_chunks: int,
        region: memory.Region | None = None,
        canonical_layout: bool = False,
    ) -> None:
        if canonical_layout and region is None:
            raise ValueError("canonical_layout needs the shared region")
        pages = memory.host_pages(kv_caches, canonical_layout)
        self._device = [memory.device_rows(t) for t in kv_caches.tensors]
        self._host = memory.host_rows(
            pages, blocks_per_chunk, num_chunks, region, canonical_layout
        )
        self._groups = memory.group_tables(
            kv_caches.group_data_refs, self._device, self._host, pages, canonical_layout
        )
        self._blocks_per_chunk = blocks_per_chunk
        self._num_chunks = num_chunks
        self._num_blocks = min((len(rows) for rows in self._device), default=0)
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._finished: list[TransferResult] = []
        self._error: BaseException | None = None
        self._closed = False
        self._lanes = {name: Lane(f"kv-{name}") for name in ("store", "load", "expedited")}
        self._region = region

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit("store", job_id, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Pool to KV cache; vLLM 0.33 waits within the step for an `expedited` one."""
        return self._submit("expedited" if expedited else "load", job_id, dst_spec, src_spec)

    def _submit(
        self, lane: str, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec
    ) -> bool:
        if self._closed:
            raise RuntimeError(f"transfer {job_id} after shutdown")
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        if len(blocks.group_sizes) != len(self._groups):
            given, known = len(blocks.group_sizes), len(self._groups)
            raise ValueError(f"transfer {job_id} has {given} KV groups, the cache has {known}")
        plan.check_range("block", blocks.block_ids, self._num_blocks)
        plan.check_range("chunk", chunks.block_ids, self._num_chunks)
        parts = plan.spans(
            blocks.block_ids,
            blocks.group_sizes,
            blocks.block_indices,
            chunks.block_ids,
            self._blocks_per_chunk,
        )
        with self._changed:
            self._pending.add(job_id)
        self._lanes[lane].submit(lambda: self._run(lane, job_id, parts))
        return True

    def _run(self, lane: str, job_id: int, parts: list[plan.Span]) -> None:
        if self._error is not None:
            return
        store = lane == "store"
        start = time.perf_counter()
        try:
            copies = plan.plan(self._groups, parts, self._blocks_per_chunk, store)
            copy.run(copies, store)
        except BaseException as error:
            logger.error("KV transfer %d (%s) failed: %s", job_id, lane, error)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return
        seconds = time.perf_counter() - start
        with self._changed:
            self._pending.discard(job_id)
            self._finished.append(TransferResult(job_id, True, copies.total, seconds))
            self._changed.notify_all()

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            self._raise_error()
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have landed; unknown and reported ones have."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._pending.isdisjoint(job_ids)
            )
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError("a KV transfer between cache and pool failed") from self._error

    def shutdown(self) -> None:
        """Finish what was submitted, then release the pool; may be called twice."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()
        self._groups.clear()
        self._device.clear()
        self._host.clear()
        region, self._region = self._region, None
        if region is not None:
            region.cleanup()
