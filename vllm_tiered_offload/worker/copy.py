# SPDX-License-Identifier: Apache-2.0
"""Moves planned bytes between two places in this process's memory.

memmove is the fastest copy there is, but gives up the GIL for every page, and a busy
engine thread may take 5 ms to hand it back: 64 MiB in 8 KiB pages took 2.2 s instead of
15 ms. process_vm_readv(2) on ourselves moves up to 1024 pages a call, at half of
memmove's speed (64 KiB pages: 4.2 of 7.8 GB/s). So pages are moved one by one for as long
as that is not held up, and the rest a thousand at a time.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import os
import time

import numpy as np

from vllm_tiered_offload.worker.plan import Copies, Int64s

IOV_MAX = 1024
CALL_BYTES = 1 << 30  # the kernel takes less than 2 GiB in one call
# Page by page is held up when it falls behind this rate (bytes per second) by this long
# (seconds): less than either way reaches undisturbed.
SLOW_RATE = 1.5e9
PATIENCE = 1e-3


def run(copies: Copies, store: bool) -> None:
    """Copy device to host (`store`) or back; the GIL is free while bytes move.

    Raises OSError (EFAULT) for pages outside this process's memory, unless they come
    first: memmove ends the process there, like any access.
    """
    target, source = (copies.host, copies.device) if store else (copies.device, copies.host)
    large = copies.size > CALL_BYTES
    _copy_each(target[large], source[large], copies.size[large], math.inf)
    target, source, size = target[~large], source[~large], copies.size[~large]
    done = _copy_each(target, source, size, PATIENCE if vector_copy_works() else math.inf)
    _copy_vectors(target[done:], source[done:], size[done:])


def _copy_each(target: Int64s, source: Int64s, size: Int64s, patience: float) -> int:
    """Move piece by piece; the number of pieces moved before that was held up."""
    move, clock = ctypes.memmove, time.perf_counter
    deadline = clock() + patience
    pieces = zip(target.tolist(), source.tolist(), size.tolist(), strict=True)
    for number, (to, of, count) in enumerate(pieces):
        if clock() > deadline:
            return number
        move(to, of, count)
        deadline += count / SLOW_RATE
    return len(size)


def _copy_vectors(target: Int64s, source: Int64s, size: Int64s) -> None:
    if len(size) == 0:
        return
    local, remote = np.column_stack((target, size)), np.column_stack((source, size))
    step = min(IOV_MAX, CALL_BYTES // int(size.max()))
    starts = range(0, len(size), step)
    call = _process_vm_readv()
    for start, expected in zip(starts, np.add.reduceat(size, starts).tolist(), strict=True):
        count, skip = min(step, len(size) - start), start * local.strides[0]
        to, of = local.ctypes.data + skip, remote.ctypes.data + skip
        copied = call(os.getpid(), to, count, of, count, 0)
        if copied != expected:
            number = ctypes.get_errno() if copied < 0 else errno.EFAULT
            raise OSError(number, f"copied {copied} of {expected} bytes: {os.strerror(number)}")


@functools.cache
def _process_vm_readv() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = (ctypes.c_int, pointer, count, pointer, count, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    return function


@functools.cache
def vector_copy_works() -> bool:
    """Whether the C library and the sandbox (older seccomp profiles) allow it."""
    source, target = np.arange(8, dtype=np.int64), np.zeros(8, np.int64)
    to, of, size = (np.array([n]) for n in (target.ctypes.data, source.ctypes.data, 64))
    try:
        _copy_vectors(to, of, size)
    except (AttributeError, OSError):
        return False
    return bool((source == target).all())
