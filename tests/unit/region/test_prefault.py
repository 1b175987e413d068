# SPDX-License-Identifier: Apache-2.0
"""All pages of a share are taken, no byte is changed, and a full kernel is an error."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vllm_tiered_offload.region import backing, libc, prefault
from vllm_tiered_offload.region.mapping import Mapping
from vllm_tiered_offload.region.prefault import Populate, Prefault
from vllm_tiered_offload.region.settings import RegionError

PAGE = mmap.PAGESIZE
SIZE = 512 * PAGE


@contextmanager
def memory() -> Iterator[tuple[int, Mapping]]:
    fd = backing.make_memfd(SIZE)
    mapping = Mapping(fd, SIZE, PAGE)
    yield fd, mapping
    mapping.release()
    os.close(fd)


def taken(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def no_populate(address: int, length: int, advice: int) -> None:
    """A kernel before 5.14."""
    if advice == libc.MADV_POPULATE_WRITE:
        raise OSError(errno.EINVAL, "madvise")
    libc.advise(address, length, advice)


def modern_kernel() -> bool:
    with memory() as (_, mapping):
        try:
            libc.advise(mapping.address, PAGE, libc.MADV_POPULATE_WRITE)
        except OSError:
            return False
        return True


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_share_is_taken_and_bytes_stay(kernel: str, threads: int) -> None:
    if kernel == "new" and not modern_kernel():
        pytest.skip("this kernel has no MADV_POPULATE_WRITE (Linux 5.14)")
    advise = libc.advise if kernel == "new" else no_populate
    with memory() as (fd, mapping):
        array = mapping.array()
        array[7 * PAGE] = 42
        assert taken(fd) == PAGE
        populate = Populate(mapping, PAGE, advise)
        ranges = [(0, 100 * PAGE), (200 * PAGE, 56 * PAGE)]
        Prefault(populate, threads, "rank 0").run(ranges, 156 * PAGE)
        assert taken(fd) == 156 * PAGE
        assert array[7 * PAGE] == 42
        assert array.sum() == 42
        del array, populate


def test_the_old_kernels_way_never_writes() -> None:
    """A peer's byte written between a read and a write back of it would be lost."""
    with memory() as (_, mapping):
        populate = Populate(mapping, PAGE, no_populate)
        populate(0, PAGE)
        # Write-protected memory can still be taken: only reading touches it.
        libc._libc.mprotect.argtypes = [*libc._libc.munmap.argtypes, libc.ctypes.c_int]
        assert libc._libc.mprotect(mapping.address, SIZE, mmap.PROT_READ) == 0
        populate(0, SIZE)
        del populate


def test_a_kernel_out_of_pages_is_one_error_and_stops_all_threads() -> None:
    calls = []

    def populate(offset: int, length: int) -> None:
        calls.append(offset)
        if offset >= 2 << 30:
            raise OSError(errno.EFAULT, "madvise")

    with pytest.raises(RegionError, match=r"rank 3: the kernel gave .* EFAULT.*lower"):
        Prefault(populate, 4, "rank 3").run([(0, 600 << 30)], 600 << 30)
    assert len(calls) < 100


def test_long_ones_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(prefault, "LOG_INTERVAL", 0.0)
    first = threading.Event()

    def populate(offset: int, length: int) -> None:
        if offset and not first.wait(10):
            raise AssertionError("no progress line")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            first.set()

    logger = logging.getLogger("vllm.tiered_offload.region")
    handler = Handler()
    logger.addHandler(handler)
    try:
        Prefault(populate, 1, "rank 0").run([(0, 256 << 20)], 256 << 20)
    finally:
        logger.removeHandler(handler)
    assert "rank 0: 0.1 of 0.3 GB of memory taken" in caplog.text


def test_what_a_progress_line_says() -> None:
    line = prefault.progress("rank 0", 12 * 10**9, 64 * 10**9, 4.0)
    assert line == "rank 0: 12.0 of 64.0 GB of memory taken, 3.0 GB/s, 17 s to go"
    assert "just started" in prefault.progress("rank 0", 0, 64 * 10**9, 0.0)


def test_threads_are_shared_between_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)))
    assert [prefault.thread_count(n) for n in (1, 8, 100)] == [16, 6, 1]
