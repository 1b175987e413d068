# SPDX-License-Identifier: Apache-2.0
"""Taking the region's pages at start instead of at first use, on several threads."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.region import libc
from vllm_tiered_offload.region.layout import Layout, Range, round_up
from vllm_tiered_offload.region.seat import logger
from vllm_tiered_offload.region.settings import RegionError

if TYPE_CHECKING:
    from vllm_tiered_offload.region.mapping import Mapping

LOG_INTERVAL = 5.0  # seconds between progress lines
_PIECE_BYTES = 64 << 20  # small enough for a live progress line and a quick stop
_MAX_THREADS = 16  # the kernel zeroes at memory speed well before that


def thread_count(workers: int) -> int:
    """Threads for one of `workers` processes that pre-fault at the same time."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // workers))


def plan(
    layout: Layout,
    mapped_bytes: int,
    granule: int,
    *,
    index: int,
    count: int,
    slot: int | None,
) -> Iterable[Range]:
    """What the `index`-th of `count` workers takes, multiples of `granule` in bytes.

    With `slot` its own slot of each row, so that the kernel places the pages on
    the worker's NUMA node; without, one contiguous share, which is faster.
    """
    if slot is not None and layout.slot_bytes >= granule:
        return layout.slot_ranges(slot)
    size = round_up(-(-mapped_bytes // count), granule)
    start = min(index * size, mapped_bytes)
    return [(start, min(size, mapped_bytes - start))]


def _pieces(ranges: Iterable[Range]) -> Iterator[Range]:
    for start, length in ranges:
        for offset in range(start, start + length, _PIECE_BYTES):
            yield offset, min(_PIECE_BYTES, start + length - offset)


class Populate:
    """Takes pages of one mapping, by whichever means this kernel has."""

    def __init__(
        self,
        mapping: Mapping,
        page: int,
        advise: Callable[[int, int, int], None] = libc.advise,
    ) -> None:
        self._mapping = mapping
        self._page = page
        self._advise = advise
        self._array: Any = None  # set where the kernel lacks MADV_POPULATE_WRITE

    def __call__(self, offset: int, length: int) -> None:
        """Take the pages of a range; bytes already there stay. Raises `OSError`."""
        if self._array is None:
            try:
                self._advise(self._mapping.address + offset, length, libc.MADV_POPULATE_WRITE)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._array = self._mapping.array()
                logger.info("No MADV_POPULATE_WRITE (Linux 5.14) here: touching every page")
        # Reading is enough: a shared mapping's hole gets a page of its own.
        # Writing back what was read would lose a peer's byte written in between.
        self._array[offset : offset + length : self._page].max()


class Prefault:
    """One process's share of the work.

    Args:
        populate: takes the pages of one range.
        threads: how many to use.
        label: whose pages these are, for the log.
    """

    def __init__(
        self,
        populate: Callable[[int, int], None],
        threads: int,
        label: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._populate = populate
        self._threads = threads
        self._label = label
        self._clock = clock
        self._lock = threading.Lock()
        self._done = 0
        self._error: OSError | None = None

    def run(self, ranges: Iterable[Range], total: int) -> float:
        """Take all pages of `ranges`, `total` bytes; returns the seconds it took.

        Raises `RegionError` when the kernel runs out of pages.
        """
        start = self._clock()
        pieces = _pieces(ranges)
        threads = [
            threading.Thread(target=self._work, args=(pieces,), daemon=True)
            for _ in range(self._threads)
        ]
        for thread in threads:
            thread.start()
        self._watch(threads, total, start)
        if self._error is not None:
            raise _explain(self._error, self._label, self._done, total)
        return self._clock() - start

    def _work(self, pieces: Iterator[Range]) -> None:
        while self._error is None:
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            try:
                self._populate(*piece)
            except OSError as error:
                self._error = error
                return
            with self._lock:
                self._done += piece[1]

    def _watch(self, threads: list[threading.Thread], total: int, start: float) -> None:
        next_line = start + LOG_INTERVAL
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                now = self._clock()
                if now >= next_line and thread.is_alive():
                    next_line = now + LOG_INTERVAL
                    logger.info("%s", progress(self._label, self._done, total, now - start))


def progress(label: str, done: int, total: int, seconds: float) -> str:
    """ "rank 0: 12.0 of 64.0 GB of memory taken, 3.2 GB/s, 16 s to go"."""
    rate = done / seconds if seconds > 0 else 0.0
    left = f"{(total - done) / rate:.0f} s to go" if rate else "just started"
    return (
        f"{label}: {done / 1e9:.1f} of {total / 1e9:.1f} GB of memory taken, "
        f"{rate / 1e9:.1f} GB/s, {left}"
    )


def _explain(error: OSError, label: str, done: int, total: int) -> RegionError:
    # EFAULT is what populating says where a plain write would be SIGBUS.
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return RegionError(
        f"{label}: the kernel gave {done} of {total} bytes and then {name}: the memory, "
        "the hugetlb pool or /dev/shm is full; lower cpu_bytes_to_use"
    )
