# SPDX-License-Identifier: Apache-2.0
"""Moves planned bytes between two places in this process's memory.

A call of memmove per page gives up the GIL per page, and a busy engine thread may
take 5 ms to hand it back each time: 64 MiB in 8 KiB pages took 2.2 s instead of
15 ms. process_vm_readv(2) on ourselves moves up to 1024 pages per call, at the same
speed up to 64 KiB a page and at 8 of memmove's 11 GB/s above that. It also answers
EFAULT where memmove would end the process.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os

import numpy as np

from vllm_tiered_offload.worker.plan import Copies, Int64s

IOV_MAX = 1024
# From here on memmove's speed outweighs the hand-over of the GIL. With at most
# IOV_MAX pieces a call stays below the kernel's limit of 2 GiB, too.
LARGE = 1 << 20


def run(copies: Copies, store: bool) -> None:
    """Copy device to host (`store`) or back; the GIL is free while bytes move.

    Raises OSError (EFAULT) when a small piece lies outside this process's memory.
    """
    target, source = (copies.host, copies.device) if store else (copies.device, copies.host)
    small = copies.size < LARGE if vector_copy_works() else np.zeros(len(copies.size), bool)
    _copy_vectors(target[small], source[small], copies.size[small])
    _copy_each(target[~small], source[~small], copies.size[~small])


def _copy_each(target: Int64s, source: Int64s, size: Int64s) -> None:
    move = ctypes.memmove
    for to, of, count in zip(target.tolist(), source.tolist(), size.tolist(), strict=True):
        move(to, of, count)


def _copy_vectors(target: Int64s, source: Int64s, size: Int64s) -> None:
    pieces = np.stack((target, size, source, size), axis=1)
    for start in range(0, len(pieces), IOV_MAX):
        part = pieces[start : start + IOV_MAX]
        to, of = np.ascontiguousarray(part[:, :2]), np.ascontiguousarray(part[:, 2:])
        copied = _process_vm_readv()(
            os.getpid(), to.ctypes.data, len(part), of.ctypes.data, len(part), 0
        )
        if copied != (expected := int(part[:, 1].sum())):
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
