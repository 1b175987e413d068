# SPDX-License-Identifier: Apache-2.0
"""A short look at a disk's speed: one thread, large requests, as the store makes them."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_tiered_offload.cli.checks import Check, ok, warn
from vllm_tiered_offload.store.direct_io import page_aligned
from vllm_tiered_offload.store.syscalls import Syscalls

MIB = 1 << 20
_REQUEST = 8 * MIB
_FILE = 256 * MIB
# A prefill of an 8B model makes KV at about this rate; a slower disk is slower to read
# than many prompts are to recompute.
_SLOW = 0.2e9


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes per second, and whether the page cache was out of the way."""

    write: float
    read: float
    direct: bool


def probe_speed(place: Path, seconds: float, syscalls: Syscalls | None = None) -> Speed:
    """Writes for half of `seconds` and reads for the other half, in at most 256 MiB.

    The file is removed again. Raises OSError.
    """
    syscalls = syscalls or Syscalls()
    path = f"{place}/.doctor-speed-{os.getpid()}"
    buffer = page_aligned(_REQUEST)
    buffer[:] = os.urandom(_REQUEST)
    fd, direct = _open(path, syscalls)
    try:
        room = min(_FILE, syscalls.free_bytes(str(place)) // 2) // _REQUEST * _REQUEST
        if room < _REQUEST:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        with contextlib.suppress(OSError):
            syscalls.fallocate(fd, room)
        sync = (lambda: None) if direct else (lambda: syscalls.fdatasync(fd))
        write, written = _rate(
            lambda at: syscalls.pwritev(fd, [buffer], at), room, seconds / 2, sync
        )
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read, _ = _rate(lambda at: syscalls.preadv(fd, [buffer], at), written, seconds / 2)
    finally:
        os.close(fd)
        os.unlink(path)
    return Speed(write, read, direct)


def _open(path: str, syscalls: Syscalls) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return syscalls.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return syscalls.open(path, flags), False


def _rate(
    move: Callable[[int], int],
    room: int,
    seconds: float,
    finish: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """(bytes per second, bytes of the file touched) of requests in order, over and over."""
    start, moved, at = time.perf_counter(), 0, 0
    while not moved or time.perf_counter() - start < seconds:
        moved += move(at)
        at = (at + _REQUEST) % room
    finish()
    return moved / (time.perf_counter() - start), min(moved, room)


def check_speed(place: Path, seconds: float) -> Iterator[Check]:
    """One line about the speed of the nearest directory that exists."""
    while not place.is_dir():
        place = place.parent
    speed = probe_speed(place, seconds)
    cache = "" if speed.direct else ", through the page cache"
    found = (
        f"writes {speed.write / 1e9:.2f} GB/s, reads {speed.read / 1e9:.2f} GB/s "
        f"(one thread, 8 MiB requests{cache})"
    )
    if min(speed.read, speed.write) < _SLOW:
        yield warn("speed", found, "short prompts may be faster to recompute than to read")
    else:
        yield ok("speed", found)
