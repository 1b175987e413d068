# SPDX-License-Identifier: Apache-2.0
"""The store's own rates: chunks from memory to disk and back, checksums on."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_tiered_offload.store import ChunkStore, Namespace, StoreSettings
from vllm_tiered_offload.store.geometry import segment_bytes_needed

MIB = 1 << 20
_MEMORY = 256 * MIB
_JOB = 64 * MIB
# As in a root of 16 GiB and more; shorter segments mean shorter writes.
_SEGMENT = 256 * MIB
# Room beside the chunks: records, the ends of segments, and slots to spare.
_ROOM, _SPARE_SEGMENTS = 1.25, 4
WHO = "odirect_fs"
_NAMESPACE = Namespace("be" * 20, private=True)


class BenchError(OSError):
    """The measurement cannot be made; the message is one line."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One direction of one contestant. `cpu_per_gb` is seconds of CPU time per 10**9 bytes."""

    who: str
    direction: str
    chunk_bytes: int
    gb_per_second: float
    cpu_per_gb: float
    direct_io: bool


def measure_store(
    place: Path, chunk_bytes: int, total: int, *, read_threads: int = 4, direct_io: str = "auto"
) -> Iterator[Measure]:
    """Stores `total` bytes of chunks in a new root below `place`, then loads them.

    Raises:
        StoreError: the directory cannot be used.
        BenchError: a chunk was not stored, or did not come back as it was.
    """
    rows = max(1, min(_MEMORY, total) // chunk_bytes)
    memory = memoryview(mmap.mmap(-1, rows * chunk_bytes))
    memory[:] = os.urandom(rows * chunk_bytes)
    segment = max(min(_SEGMENT, total), segment_bytes_needed(chunk_bytes, 1, mmap.PAGESIZE))
    settings = StoreSettings(
        (place,),
        max_bytes=int(total * _ROOM) + _SPARE_SEGMENTS * (segment + MIB),
        segment_bytes=segment,
        read_threads=read_threads,
        direct_io=direct_io,
    )
    keys = [os.urandom(32) + bytes(4) for _ in range(max(1, total // chunk_bytes))]
    store = ChunkStore(settings, _NAMESPACE, memory, chunk_bytes)
    try:
        for direction, submit in (("store", store.submit_store), ("load", store.submit_load)):
            seconds, cpu = _run(store, submit, keys, rows, chunk_bytes)
            moved = len(keys) * chunk_bytes
            root = store.stats().roots[0]
            direct = root.direct_write if direction == "store" else root.direct_read
            yield Measure(
                WHO,
                direction,
                chunk_bytes,
                moved / seconds / 1e9,
                cpu / moved * 1e9,
                direct,
            )
    finally:
        store.shutdown()


def _run(
    store: ChunkStore,
    submit: Callable[[int, list[bytes], list[int]], None],
    keys: list[bytes],
    rows: int,
    chunk_bytes: int,
) -> tuple[float, float]:
    """(seconds, CPU seconds of this process) to move all keys in jobs of 64 MiB."""
    per_job = max(1, min(rows, _JOB // chunk_bytes))
    free = [first * per_job for first in range(max(1, rows // per_job))]
    taken: dict[int, int] = {}  # a row belongs to one job at a time, and jobs overtake
    began, cpu = time.perf_counter(), time.process_time()
    for number, start in enumerate(range(0, len(keys), per_job)):
        part = keys[start : start + per_job]
        while not free:
            time.sleep(0.0005)
            free += [taken.pop(job) for job in _completed(store)]
        taken[number] = free.pop()
        submit(number, part, list(range(taken[number], taken[number] + len(part))))
    store.drain()
    _completed(store)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    dropped = sum(store.stats().dropped_chunks.values())
    if dropped:
        raise BenchError(f"{dropped} chunks were not stored: {store.stats().dropped_chunks}")
    return seconds, cpu


def _completed(store: ChunkStore) -> list[int]:
    """The jobs that ended. Raises BenchError for one that failed."""
    done = store.take_completions()
    for job in done:
        if not job.ok:
            raise BenchError(f"a job failed: {job.error}")
    return [job.job_id for job in done]
