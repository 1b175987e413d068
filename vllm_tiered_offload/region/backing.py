# SPDX-License-Identifier: Apache-2.0
"""The object behind the mapping: an anonymous memory file, or a file's descriptor."""

from __future__ import annotations

import errno
import fcntl
import os

from vllm_tiered_offload.region.settings import RegionError

# Flags of memfd_create(2) that older Python headers lack.
_MFD_CLOEXEC = 0x0001
_MFD_ALLOW_SEALING = 0x0002
_MFD_HUGETLB = 0x0004
_MFD_NOEXEC_SEAL = 0x0008  # Linux 6.3; without it vm.memfd_noexec=2 refuses
_MFD_HUGE_SHIFT = 26

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NO_MEMFD = (errno.ENOSYS, errno.EPERM, errno.EACCES)


class MemfdUnavailable(RegionError):
    """This kernel or sandbox has no memfd at all."""


def _create_memfd(name: str, huge_bytes: int) -> int:
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    if huge_bytes:
        flags |= _MFD_HUGETLB | (huge_bytes.bit_length() - 1) << _MFD_HUGE_SHIFT
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)


def probe_memfd() -> None:
    """Raise `MemfdUnavailable` where a memory file cannot be made."""
    os.close(_checked_memfd(0))


def _checked_memfd(huge_bytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise MemfdUnavailable("this Python has no memfd_create")
    try:
        return _create_memfd("vllm-tiered-offload", huge_bytes)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        if error.errno in _NO_MEMFD:
            raise MemfdUnavailable(f"memfd_create fails with {name}") from error
        raise RegionError(
            f"huge_pages: memory with pages of {huge_bytes} bytes fails with {name}"
        ) from error


def make_memfd(length: int, huge_bytes: int = 0) -> int:
    """Descriptor of a new memory file of `length` bytes whose size is sealed.

    The seals matter: a peer that shrank the file would turn every access of
    the others into SIGBUS. Raises `MemfdUnavailable` or `RegionError`.

    Args:
        length: bytes, a multiple of `huge_bytes` when that is not 0.
        huge_bytes: size of the reserved huge pages to use, 0 for normal pages.
    """
    fd = _checked_memfd(huge_bytes)
    try:
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_received(fd: int, length: int) -> None:
    """Refuse a descriptor of another size, or one whose size a peer can change."""
    size = os.fstat(fd).st_size
    if size != length:
        raise RegionError(f"the region handed over has {size} bytes, {length} were expected")
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise RegionError("the region handed over is not sealed against a change of size")
