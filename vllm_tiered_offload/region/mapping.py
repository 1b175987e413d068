# SPDX-License-Identifier: Apache-2.0
"""One process's mapping of the region, unmapped when its last user lets go."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any

from vllm_tiered_offload.region import libc
from vllm_tiered_offload.region.layout import round_up


class _Memory:
    """Owner of an address range in numpy's eyes: every array over it keeps it alive."""

    def __init__(self, address: int, length: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (length,),
            "typestr": "|i1",
            "version": 3,
        }


def _map_aligned(fd: int, length: int, alignment: int) -> int:
    """Map `fd` at a multiple of `alignment`, or huge pages cannot be mapped as such."""
    reserve_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc.MAP_NORESERVE
    reserved = length + alignment
    low = libc.map_memory(None, reserved, 0, reserve_flags, -1)
    address = round_up(low, alignment)
    try:
        libc.map_memory(address, length, libc.READ_WRITE, mmap.MAP_SHARED | libc.MAP_FIXED, fd)
    except OSError:
        libc.unmap_memory(low, reserved)
        raise
    end = round_up(address + length, mmap.PAGESIZE)
    if address > low:
        libc.unmap_memory(low, address - low)
    if low + reserved > end:
        libc.unmap_memory(end, low + reserved - end)
    return address


def _unmap(owner: int, address: int, length: int) -> None:
    if os.getpid() == owner:  # a forked child has other things at this address
        libc.unmap_memory(address, length)


class Mapping:
    """`length` bytes of `fd`, mapped shared and writable; `fd` may be closed afterwards.

    The mapping does not survive a fork: a helper forked by torch or vLLM would
    otherwise hold the memory after the engine's death. It is left out of core
    dumps (prompts' KV, and hundreds of GB).

    Args:
        length: bytes, a multiple of the backing's page size.
        alignment: bytes the address is a multiple of.
    """

    def __init__(self, fd: int, length: int, alignment: int) -> None:
        self.length = length
        self.address = _map_aligned(fd, length, alignment)
        memory = _Memory(self.address, length)
        # No unmapping at interpreter exit: daemon threads may still copy.
        self._finalizer = weakref.finalize(memory, _unmap, os.getpid(), self.address, length)
        self._finalizer.atexit = False
        self._memory: _Memory | None = memory
        libc.advise(self.address, length, libc.MADV_DONTFORK)
        with contextlib.suppress(OSError):
            libc.advise(self.address, length, libc.MADV_DONTDUMP)

    def array(self) -> Any:
        """All bytes as an int8 numpy array that shares the memory and keeps it mapped."""
        import numpy as np

        if self._memory is None:
            raise ValueError("the region has been released")
        return np.asarray(self._memory)

    def release(self) -> bool:
        """Let go; True if that unmapped it, False if arrays over it are still in use."""
        self._memory = None
        return not self._finalizer.alive
