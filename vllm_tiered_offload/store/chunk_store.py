# SPDX-License-Identifier: Apache-2.0
"""The facade: jobs in, completions out, over one or more roots.

Nothing here waits for a disk but the constructor, ``drain``, ``switch_namespace`` and
``shutdown``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.api import (
    Completion,
    Namespace,
    StoreError,
    StoreEvent,
    StoreSettings,
    StoreStats,
)
from vllm_tiered_offload.store.counters import Counters
from vllm_tiered_offload.store.direct_io import IOV_MAX
from vllm_tiered_offload.store.disk import Disk
from vllm_tiered_offload.store.hits import Hits
from vllm_tiered_offload.store.index import RECORD_BITS, Index
from vllm_tiered_offload.store.io_pool import Piece
from vllm_tiered_offload.store.jobs import Job, JobTable
from vllm_tiered_offload.store.opening import Shared
from vllm_tiered_offload.store.runs import SMALLEST_SHARE, Run, cut
from vllm_tiered_offload.store.segment import Segment
from vllm_tiered_offload.store.syscalls import Syscalls
from vllm_tiered_offload.store.totals import add_up

Placed = tuple[int, bytes, memoryview]  # place, key, row


class ChunkStore:
    """Chunks by key on disk, moved to and from rows of one buffer.

    ``memory`` is flat, writable bytes, page aligned; row r is its r-th ``chunk_bytes``. Calls
    come from one thread (the scheduler's); ``contains`` and ``stats`` may come from any.

    Raises StoreError, in one line, for settings and roots that cannot work.
    """

    def __init__(
        self,
        settings: StoreSettings,
        namespace: Namespace,
        memory: memoryview,
        chunk_bytes: int,
        *,
        events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        syscalls: Syscalls | None = None,
        page_bytes: int = fmt.MIN_PAGE_BYTES,
    ) -> None:
        _check_memory(memory, chunk_bytes)
        self.settings = settings
        self.namespace = namespace
        self.chunk_bytes = chunk_bytes
        self._memory = memory
        self._index = Index(events=events)
        self._places = self._index.places
        self._jobs = JobTable(clock)
        self._clock = clock
        self._counters = Counters()  # of what concerns no root
        self._hits = Hits(self._index, clock)
        self._note_hit = self._hits.note
        self._storing: set[bytes] = set()
        self._next_disk = 0
        self._some_unavailable = False  # a root is stalled or sick
        self._closed = False
        self._stop_watching = threading.Event()
        self._disks: list[Disk] = []
        try:
            self._open_disks(syscalls or Syscalls(), page_bytes)
        except BaseException:
            self.shutdown(timeout=1.0)
            raise
        self._index.take_events()  # what was there before is no news
        threading.Thread(target=self._watch_loop, name="vto-watch", daemon=True).start()

    def _open_disks(self, syscalls: Syscalls, page_bytes: int) -> None:
        shared = Shared(
            index=self._index,
            jobs=self._jobs,
            forget_storing=self._storing.difference_update,
            drain_hits=self._drain_hits,
            syscalls=syscalls,
            clock=self._clock,
            page_bytes=page_bytes,
        )
        row = self._row(1 if len(self._memory) >= 2 * self.chunk_bytes else 0)
        for number, path in enumerate(self.settings.root_dirs):
            self._disks.append(
                Disk(number, path, self.settings, self.namespace, row, shared=shared)
            )

    def contains(self, key: bytes) -> bool:
        """Whether a load of this key would find it. Counts as a hit. Touches no disk."""
        if key not in self._places or (self._some_unavailable and self._is_unavailable(key)):
            return False
        self._note_hit(key)
        return True

    def submit_store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Stores rows under keys, which come in prefix order. The rows must stay as they are
        until the job's completion. Chunks held already are not written again."""
        places, storing = self._places, self._storing
        fresh = [
            (key, row)
            for key, row in zip(keys, rows, strict=True)
            if key not in places and key not in storing
        ]
        self._hits.note_all(key for key in keys if key in places)
        job = self._jobs.start(job_id, len(fresh), is_load=False)
        most = self._chunks_per_piece()
        for start in range(0, len(fresh), most):
            self._store_piece(job, fresh[start : start + most])

    def submit_load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Reads chunks into rows, in any order. The rows are the store's until completion."""
        job = self._jobs.start(job_id, len(keys), is_load=True)
        self._hits.note_all(keys)
        left = self._start_loads(job, list(zip(keys, rows, strict=True)))
        # Between the look at their places and the claim they may have moved, for the sake of
        # the look-up that found them, and their segment gone.
        left = self._start_loads(job, left)
        if left:
            self._counters.count("failed.unknown", len(left))
            self._jobs.fail(job, len(left), f"{left[0][0].hex()} is not held")

    def take_completions(self) -> list[Completion]:
        """Jobs that ended since the last call, each exactly once."""
        return self._jobs.take()

    def take_events(self) -> list[StoreEvent]:
        """Keys gained and lost since the last call, in order; empty unless asked for."""
        return [StoreEvent(removed, tuple(keys)) for removed, keys in self._index.take_events()]

    @property
    def pending_jobs(self) -> int:
        """Submitted and not yet completed."""
        return self._jobs.pending

    def drain(self) -> None:
        """Returns when all submitted jobs have completed. Aborts none."""
        self._jobs.wait_idle()

    def switch_namespace(self, namespace: Namespace) -> None:
        """Forgets every chunk and goes on in another namespace. Call after ``drain``.

        Raises StoreError while jobs are in flight.
        """
        if self._jobs.pending:
            raise StoreError(f"{self._jobs.pending} jobs are in flight; drain() comes first")
        self.namespace = namespace
        with contextlib.ExitStack() as quiet:
            for disk in self._disks:
                quiet.enter_context(disk.quiet())
            self._index.clear()
            self._hits.clear()
            for disk in self._disks:
                disk.switch_namespace(namespace)
        self._index.take_events()

    def stats(self) -> StoreStats:
        """Counters and gauges of this moment; thread safe."""
        roots = tuple(disk.stats(self._chunks_of(disk)) for disk in self._disks)
        return add_up(
            roots,
            self._counters.snapshot(),
            chunks=len(self._index),
            pending_jobs=self._jobs.pending,
        )

    def describe(self) -> dict[str, object]:
        """Facts for the start-up line, root by root."""
        return {
            "fingerprint": self.namespace.fingerprint,
            "private": self.namespace.private,
            "chunk_bytes": self.chunk_bytes,
            "io_bytes": self.settings.io_bytes,
            "roots": [disk.describe() for disk in self._disks],
        }

    def shutdown(self, timeout: float = 5.0) -> bool:
        """Finishes what is queued as far as ``timeout`` seconds allow, and ends the threads.

        False if a thread hangs in the kernel: its job is then not reported, for its rows are
        not free. What was not begun completes with an error.
        """
        deadline = time.monotonic() + timeout
        self._closed = True
        self._stop_watching.set()
        for disk in self._disks:
            disk.parts.pool.stop()
        self._jobs.wait_idle(timeout / 2)
        for disk in self._disks:
            self._abandon(disk)
        ended = True
        for disk in self._disks:
            ended = disk.shutdown(deadline) and ended
        self._places.clear()
        if ended:
            self._memory = memoryview(bytearray())  # its owner may want to unmap it
        return ended

    def _store_piece(self, job: Job, chunks: list[tuple[bytes, int]]) -> None:
        """Queues an extent's worth on the next root that takes it, or leaves it out."""
        reason = "shutdown" if self._closed else ""
        for _ in range(len(self._disks) if not reason else 0):
            disk = self._disks[self._next_disk]
            self._next_disk = (self._next_disk + 1) % len(self._disks)
            refusal = disk.refuses_stores()
            if refusal is None:
                taken = chunks[: disk.parts.pool.room_for_stores() // self.chunk_bytes]
                if taken and self._queue(disk, job, taken):
                    chunks = chunks[len(taken) :]
                    if not chunks:
                        return
                refusal = "queue"
            reason = reason or refusal
        self._counters.count(f"dropped.{reason}", len(chunks))
        self._jobs.settle(job, len(chunks))

    def _queue(self, disk: Disk, job: Job, chunks: list[tuple[bytes, int]]) -> bool:
        keys = [key for key, _ in chunks]
        piece = Piece(job, keys, [self._row(row) for _, row in chunks])
        self._storing.update(keys)
        if disk.parts.pool.put_store(piece):
            return True
        self._storing.difference_update(keys)
        return False

    def _claim(self, ordinal: int, loads: int) -> Segment | None:
        """The segment, kept from eviction until its loads are done; None if it is gone."""
        with self._index.lock:
            segment = self._index.segments.get(ordinal)
            if segment is None or segment.gone:
                return None
            segment.loads += loads
            return segment

    def _start_loads(
        self, job: Job, chunks: list[tuple[bytes, int]]
    ) -> list[tuple[bytes, int]]:
        """Queues loads of keys into rows; returns those whose segment is gone."""
        get = self._places.get
        wanted = sorted((get(key, -1), key, row) for key, row in chunks)
        share = len(chunks) * self.chunk_bytes // self.settings.read_threads
        most_bytes = min(self.settings.io_bytes, max(share, SMALLEST_SHARE))
        left: list[tuple[bytes, int]] = []
        for ordinal, group in groupby(wanted, key=lambda item: item[0] >> RECORD_BITS):
            found = list(group)
            segment = self._claim(ordinal, len(found))
            if segment is None:
                left += [(key, row) for _, key, row in found]
            else:
                placed = [(place, key, self._row(row)) for place, key, row in found]
                self._load(job, segment, placed, most_bytes)
        return left

    def _load(
        self, job: Job, segment: Segment, placed: Sequence[Placed], most_bytes: int
    ) -> None:
        disk = self._disks[segment.root]
        runs = [Run(job, segment, chunks) for chunks in cut(segment, placed, most_bytes)]
        if not disk.parts.pool.put_loads(runs):
            for run in runs:
                disk.reader.cancel(run)

    def _chunks_per_piece(self) -> int:
        return max(1, min(self.settings.io_bytes // self.chunk_bytes, IOV_MAX // 2 - 1))

    def _row(self, row: int) -> memoryview:
        start = row * self.chunk_bytes
        return self._memory[start : start + self.chunk_bytes]

    def _is_unavailable(self, key: bytes) -> bool:
        segment = self._index.segments.get(self._places.get(key, -1) >> RECORD_BITS)
        return segment is None or self._disks[segment.root].unavailable

    def _chunks_of(self, disk: Disk) -> int:
        if len(self._disks) == 1:
            return len(self._index)
        return sum(len(segment.keys) for segment in disk.parts.catalogue.all())

    def _drain_hits(self) -> None:
        self._hits.drain([disk.parts for disk in self._disks])

    def _watch_loop(self) -> None:
        """Touches no disk, so that it notices the one that hangs."""
        timeout = self.settings.stall_timeout
        while not self._stop_watching.wait(min(0.25, timeout / 4)):
            for disk in self._disks:
                disk.notice_stall(timeout)
            self._some_unavailable = any(disk.unavailable for disk in self._disks)

    def _abandon(self, disk: Disk) -> None:
        runs, pieces = disk.parts.pool.abandon_queues()
        for run in runs:
            disk.reader.cancel(run)
        for piece in pieces:
            self._storing.difference_update(piece.keys)
            if piece.job is not None:
                self._jobs.fail(piece.job, len(piece.keys), "the store is shutting down")


def _check_memory(memory: memoryview, chunk_bytes: int) -> None:
    if memory.ndim != 1 or memory.itemsize != 1 or memory.readonly:
        raise StoreError("memory must be a flat, writable view of bytes")
    if chunk_bytes < 1 or len(memory) < chunk_bytes:
        raise StoreError(f"chunks of {chunk_bytes} bytes in a memory of {len(memory)} bytes")
