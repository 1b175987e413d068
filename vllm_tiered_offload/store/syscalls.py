# SPDX-License-Identifier: Apache-2.0
"""The system calls of the store, in one object that a test can bend.

Every call that can block on a disk or fail because of one goes through here.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

# linux/stat.h: struct statx is 256 bytes, the direct I/O fields lie at 152 and 156.
_STATX_DIOALIGN = 0x2000
_STATX_MASK_AT, _STATX_MEM_AT, _STATX_OFFSET_AT, _STATX_BYTES = 0, 152, 156, 256
_AT_EMPTY_PATH = 0x1000

# What the process or the machine has run out of for the moment: no fault of any file.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_libc = ctypes.CDLL(None, use_errno=True)
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no symlink, never stuck in a FIFO


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """What a file system wants of direct I/O; 0 and 0 mean that it refuses."""

    memory: int
    offset: int


class Syscalls:
    """Thin wrappers. Subclass to inject errors, delays and short counts."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | _OPEN, mode)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path, follow_symlinks=False)

    def free_bytes(self, path: str) -> int:
        """Bytes an unprivileged process may still take."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    def free_inodes(self, path: str) -> int:
        return os.statvfs(path).f_favail

    def total_bytes(self, path: str) -> int:
        stat = os.statvfs(path)
        return stat.f_blocks * stat.f_frsize

    def fallocate(self, fd: int, length: int) -> None:
        """fallocate(2) itself: os.posix_fallocate writes zeros where it is not supported,
        which fails on a direct descriptor and takes CPU time on a buffered one."""
        if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(length)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def direct_alignment(self, fd: int) -> DirectAlignment | None:
        """statx(STATX_DIOALIGN) of an open file; None where nobody says."""
        buffer = ctypes.create_string_buffer(_STATX_BYTES)
        try:
            failed = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0
        except AttributeError:
            return None
        mask = int.from_bytes(buffer.raw[_STATX_MASK_AT : _STATX_MASK_AT + 4], "little")
        if failed or not mask & _STATX_DIOALIGN:
            return None
        memory, offset = (
            int.from_bytes(buffer.raw[at : at + 4], "little")
            for at in (_STATX_MEM_AT, _STATX_OFFSET_AT)
        )
        return DirectAlignment(memory, offset)


def errno_name(error: OSError) -> str:
    """'ENOSPC', or the bare message where an error carries no number."""
    return errno.errorcode.get(error.errno or 0, "") or type(error).__name__


def explain(error: OSError) -> str:
    """'ENOSPC: No space left on device' for a log line."""
    return f"{errno_name(error)}: {error.strerror or error}"
