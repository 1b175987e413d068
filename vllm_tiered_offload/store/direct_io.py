# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of many buffers, direct where that works.

One call moves up to ``io_bytes``: the kernel splits it into many commands for
the device, and Python takes its lock once instead of once a chunk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence

from vllm_tiered_offload.store.syscalls import DirectAlignment, Syscalls, explain

# Linux: UIO_MAXIOV. One more gives EINVAL, which would look like refused direct I/O.
IOV_MAX = 1024
MAX_CALL_BYTES = 0x7FF0_0000  # read and write stop at 0x7ffff000, mid-buffer
REFUSALS_UNTIL_OFF = 3


class ShortTransferError(OSError):
    """The kernel moves nothing more: end of file, or no explanation."""

    def __init__(self, done: int) -> None:
        super().__init__(errno.EIO, f"transfer stopped after {done} bytes")
        self.done = done


def page_aligned(size: int) -> memoryview:
    """``size`` zero bytes of memory that start at a page boundary."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def is_direct(fd: int) -> bool:
    """What the descriptor itself says, which is what the kernel will do."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def set_direct(fd: int, on: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


class BlockIO:
    """Transfers for one root; remembers whether direct I/O works there. Thread safe.

    ``alignment`` is the root's page size: where a short count is taken up again.
    """

    def __init__(self, syscalls: Syscalls, alignment: int, *, direct: bool) -> None:
        self.direct = direct
        self.refusals = 0
        # As read back from the last descriptor opened for it.
        self.last_read_mode = self.last_write_mode = direct
        self._syscalls = syscalls
        self._alignment = alignment
        self._lock = threading.Lock()

    def open(self, path: str, flags: int) -> int:
        """A descriptor, direct if the root is; EINVAL counts as a refusal."""
        direct = self.direct  # once: the refusal may be the one that turns it off
        fd = self._open_direct(path, flags) if direct else None
        if fd is None:
            # open(2) has created the file already when it refuses O_DIRECT.
            fd = self._syscalls.open(path, flags & ~os.O_EXCL if direct else flags)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            self.last_read_mode = is_direct(fd)
        else:
            self.last_write_mode = is_direct(fd)
        return fd

    def _open_direct(self, path: str, flags: int) -> int | None:
        try:
            return self._syscalls.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self._count_refusal()
        return None

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Writes all of it, and waits for the disk where the page cache took it.

        Raises OSError; ShortTransferError when the file takes no more.
        """
        for part, at in _calls(buffers, offset):
            self._move(fd, part, at, writing=True)
        if not is_direct(fd):
            self._syscalls.fdatasync(fd)

    def sync(self, fd: int) -> None:
        self._syscalls.fdatasync(fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fills the buffers; returns the bytes read, fewer only at the end of the file."""
        try:
            for part, at in _calls(buffers, offset):
                self._move(fd, part, at, writing=False)
        except ShortTransferError as short:
            return at - offset + short.done
        return sum(map(len, buffers))

    def _move(self, fd: int, part: Sequence[memoryview], offset: int, *, writing: bool) -> None:
        size, done = sum(map(len, part)), 0
        while done < size:
            count = self._call(fd, _skip(part, done), offset + done, writing=writing)
            # Direct I/O goes on only at a multiple of the alignment: what lies between
            # that and the count is moved twice.
            rest = count % self._alignment if done + count < size else 0
            if count == rest:
                raise ShortTransferError(done + count)
            done += count - rest

    def _call(self, fd: int, part: Sequence[memoryview], offset: int, *, writing: bool) -> int:
        call = self._syscalls.pwritev if writing else self._syscalls.preadv
        try:
            return call(fd, part, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct(fd):
                raise
        self._count_refusal()
        # Other threads' transfers on this descriptor turn buffered for a moment, which
        # costs them speed and nothing else.
        set_direct(fd, False)
        try:
            count = call(fd, part, offset)
            if writing:
                self._syscalls.fdatasync(fd)
            return count
        finally:
            if self.direct:
                set_direct(fd, True)

    def _count_refusal(self) -> None:
        with self._lock:
            self.refusals += 1
            if self.refusals >= REFUSALS_UNTIL_OFF:
                self.direct = False


def _calls(
    buffers: Sequence[memoryview], offset: int
) -> Iterator[tuple[list[memoryview], int]]:
    """Cuts a transfer into what one call may carry, with the file offset of each part."""
    size = sum(map(len, buffers))
    if len(buffers) <= IOV_MAX and size <= MAX_CALL_BYTES:
        yield list(buffers), offset
        return
    part: list[memoryview] = []
    size = 0
    for buffer in buffers:
        if part and (len(part) == IOV_MAX or size + len(buffer) > MAX_CALL_BYTES):
            yield part, offset
            offset += size
            part, size = [], 0
        part.append(buffer)
        size += len(buffer)
    if part:
        yield part, offset


def _skip(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """The buffers without their first ``count`` bytes."""
    if count == 0:
        return buffers
    for place, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[place + 1 :]]
        count -= len(buffer)
    return []


def _stated_refusal(
    wanted: DirectAlignment | None, page_bytes: int, row_bytes: int
) -> str | None:
    if wanted is None:
        return None
    if wanted.offset == 0:
        return "the file system reports no direct I/O"
    if page_bytes % wanted.offset:
        return f"pages of {page_bytes} bytes, the file system wants {wanted.offset}"
    if wanted.memory and row_bytes % wanted.memory:
        return f"rows of {row_bytes} bytes, the device wants {wanted.memory} in memory"
    return None


def refusal(
    directory: str, syscalls: Syscalls, page_bytes: int, row: memoryview, pad: memoryview
) -> str | None:
    """Tries direct I/O in ``directory`` with the real buffer: why it does not work, or None.

    Writes a page, the front of ``row`` and ``pad`` as one call to a file of its own, and reads
    them back, the row into itself. Raises OSError for what is no refusal: EACCES, EROFS and
    ENOSPC are not about direct I/O.

    Args:
        pad: what fills up ``row`` to whole pages.
    """
    path = f"{directory}/.direct-probe-{os.getpid()}-{time.monotonic_ns()}"
    page, back = page_aligned(page_bytes), page_aligned(page_bytes)
    page[:] = os.urandom(page_bytes)
    fd = -1
    try:
        fd = syscalls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        wanted = syscalls.direct_alignment(fd)
        stated = _stated_refusal(wanted, page_bytes, len(row))
        if stated is not None:
            return stated
        # What could be refused is an address, or a length modulo the alignment. The rest is
        # left out, for the root may be full.
        unit = max(page_bytes, wanted.memory if wanted else 0)
        row = row[: len(row) % unit + unit]
        size = page_bytes + len(row) + len(pad)
        if syscalls.pwritev(fd, [page, row, pad], 0) != size:
            return "a probe was written short"
        if syscalls.preadv(fd, [back, row, pad], 0) != size or back != page:
            return "a probe came back different"
        return None if is_direct(fd) else "the descriptor lost O_DIRECT"
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return explain(error)
    finally:
        if fd >= 0:
            os.close(fd)
        with contextlib.suppress(OSError):
            syscalls.unlink(path)
