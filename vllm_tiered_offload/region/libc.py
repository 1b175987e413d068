# SPDX-License-Identifier: Apache-2.0
"""The memory calls of libc, without what Python's `mmap` adds.

`mmap.mmap` keeps a duplicate of the descriptor for its whole life: a forked
helper inherits that duplicate and holds all of the region's memory after the
engine has died. All calls release the GIL.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python 3.11's mmap module

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def map_memory(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    """Address of a new mapping; raises `OSError`."""
    result = _libc.mmap(address, length, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        raise _error("mmap")
    return int(result)


def unmap_memory(address: int, length: int) -> None:
    if _libc.munmap(address, length):
        raise _error("munmap")


def advise(address: int, length: int, advice: int) -> None:
    """madvise(2); raises `OSError` with the kernel's errno."""
    if _libc.madvise(address, length, advice):
        raise _error("madvise")
