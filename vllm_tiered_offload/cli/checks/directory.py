# SPDX-License-Identifier: Apache-2.0
"""A root directory: its file system, and that what the store needs of it works."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_tiered_offload.cli.checks import Check, fail, ok, warn
from vllm_tiered_offload.cli.output import human_bytes
from vllm_tiered_offload.config.root_dirs import root_problem
from vllm_tiered_offload.store import StoreError, locks
from vllm_tiered_offload.store.direct_io import page_aligned
from vllm_tiered_offload.store.geometry import read_geometry
from vllm_tiered_offload.store.syscalls import Syscalls, explain

MIB = 1 << 20
_FEW_INODES = 1000
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p")
_PROBE_BYTES = MIB
# In another process: flock of one's own descriptors would not show a broken lock manager.
_LOCK_IN_CHILD = (
    "import fcntl, os, sys\n"
    "fd = os.open(sys.argv[1], os.O_RDWR)\n"
    "try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except BlockingIOError: sys.exit(0)\n"
    "sys.exit(1)\n"
)


def mount_of(path: Path, mountinfo: str | None = None) -> tuple[str, str]:
    """(file system type, mount point) of a path, from /proc/self/mountinfo."""
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    best = ("unknown", "/")
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        if not right:
            continue
        point = left.split()[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= len(best[1]):
            best = (right.split()[0], point)
    return best


def check_directory(
    root: Path,
    max_bytes: int | None = None,
    reading: bool = False,
    syscalls: Syscalls | None = None,
) -> Iterator[Check]:
    """Checks of one root. What does not exist is probed in the nearest parent that does."""
    syscalls = syscalls or Syscalls()
    place = root
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    usable = _permissions(root, place, reading)
    yield usable
    yield _file_system(*mount_of(place.resolve()))
    yield _space(os.statvfs(place), max_bytes, root)
    yield _inodes(os.statvfs(place))
    yield from _store(root)
    if usable.level != "fail" and not reading:
        yield from _write_probes(place, syscalls)


def _permissions(root: Path, place: Path, reading: bool) -> Check:
    name = "directory"
    problem = root_problem(root, "root_dir", "read" if reading else "read_write")
    if problem is not None:
        return fail(name, *problem.problem.split("; ", 1))
    info = place.stat()
    mode = stat.S_IMODE(info.st_mode)
    found = f"{place} belongs to uid {info.st_uid}, mode {mode:04o}"
    if place != root:
        return ok(name, f"{root} will be made (0700) in {place}")
    if mode & stat.S_ISVTX:
        return warn(
            name, f"{found}: shared by all users", f"give a directory of its own in {place}"
        )
    if mode & 0o077:
        return warn(
            name,
            f"{found}: others may enter",
            f"KV is prompt text in another form; chmod 700 {place} (segments are 0600 anyway)",
        )
    return ok(name, found)


def _file_system(kind: str, point: str) -> Check:
    found = f"{kind} at {point}"
    if kind in ("tmpfs", "ramfs"):
        return warn("file system", found, "this is memory, not a disk; nothing survives a boot")
    if kind == "overlay":
        return warn(
            "file system", found, "a container's own layer; mount a volume that outlives it"
        )
    if kind.startswith("fuse"):
        return warn("file system", found, "check that locks and direct I/O below are ok")
    if kind in _NETWORK:
        return warn(
            "file system",
            found,
            "the lock check sees this host only; NFS must be mounted without local_lock",
        )
    return ok("file system", found)


def _space(info: os.statvfs_result, max_bytes: int | None, root: Path) -> Check:
    free = info.f_bavail * info.f_frsize
    total = info.f_blocks * info.f_frsize
    found = f"{human_bytes(free)} of {human_bytes(total)} free"
    if max_bytes is not None and max_bytes > total:
        return fail(
            "free space",
            f"{found}, max_bytes is {human_bytes(max_bytes)}",
            "max_bytes cannot be more than the file system; lower it",
        )
    held = _allocated(root)
    if max_bytes is not None and max_bytes > free + held:
        return warn(
            "free space",
            f"{found}, max_bytes is {human_bytes(max_bytes)}",
            "free some, or lower max_bytes; stores pause when the disk is full",
        )
    return ok("free space", found + (f", {human_bytes(held)} held by the root" if held else ""))


def _allocated(root: Path) -> int:
    """Bytes that the root's own segments take already."""
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(root / "segments"):
            total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def _inodes(info: os.statvfs_result) -> Check:
    if info.f_files == 0:
        return ok("inodes", "made as needed")
    if info.f_favail < _FEW_INODES:
        return warn("inodes", f"{info.f_favail} free", "a root takes some hundred; free some")
    return ok("inodes", f"{info.f_favail:,} free")


def _store(root: Path) -> Iterator[Check]:
    """What an earlier run left there; nothing where the directory is new."""
    try:
        geometry = read_geometry(str(root))
    except StoreError as error:
        yield fail("store", str(error), "use the version that wrote it, or another directory")
        return
    except OSError as error:
        if error.errno != errno.ENOTDIR:  # told by what looked at the directory itself
            why = f"{root}/root.json: {explain(error)}"
            yield fail("store", why, "the engine's user must be able to read it")
        return
    if geometry is not None:
        bound = human_bytes(geometry.max_bytes) if geometry.max_bytes else "none"
        yield ok("store", f"segments of {human_bytes(geometry.segment_bytes)}, bound {bound}")


def _write_probes(place: Path, syscalls: Syscalls) -> Iterator[Check]:
    path = f"{place}/.doctor-{os.getpid()}"
    try:
        yield _direct_io(path, syscalls)
        yield _preallocation(path, syscalls)
        yield _rename(path)
        yield _locks(str(place), path, syscalls)
    except OSError as error:
        yield fail("write", explain(error), "the store cannot work here; see the error's name")
    finally:
        for name in (path, f"{path}.new"):
            with contextlib.suppress(OSError):
                os.unlink(name)


def _direct_io(path: str, syscalls: Syscalls) -> Check:
    """Writes and reads back with O_DIRECT, from and into page-aligned memory."""
    name = "direct I/O"
    out, back = page_aligned(_PROBE_BYTES), page_aligned(_PROBE_BYTES)
    out[:] = os.urandom(_PROBE_BYTES)
    buffered = syscalls.open(path, os.O_RDWR | os.O_CREAT)
    try:
        asked = syscalls.direct_alignment(buffered)
    finally:
        os.close(buffered)
    advice = "works buffered, at more CPU time and page cache; use ext4 or xfs on a local disk"
    try:
        fd = syscalls.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return warn(name, f"refused ({explain(error)})", advice)
    try:
        moved = syscalls.pwritev(fd, [out], 0), syscalls.preadv(fd, [back], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return warn(name, f"opens, but transfers are refused ({explain(error)})", advice)
    finally:
        os.close(fd)
    if moved != (_PROBE_BYTES, _PROBE_BYTES) or out != back:
        return fail(name, f"read back other bytes ({moved[0]} written)", "do not use this disk")
    told = f"alignment {asked.offset}" if asked else "alignment not told"
    return ok(name, f"writes and reads back; {told}")


def _preallocation(path: str, syscalls: Syscalls) -> Check:
    fd = syscalls.open(path, os.O_RDWR | os.O_CREAT)
    try:
        syscalls.fallocate(fd, 4 * MIB)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return warn(
            "preallocation",
            f"fallocate: {explain(error)}",
            "works; a full disk shows only when it is written to",
        )
    finally:
        os.close(fd)
    return ok("preallocation", "fallocate works")


def _rename(path: str) -> Check:
    fresh = f"{path}.new"
    with open(fresh, "w") as file:
        file.write("new")
    os.replace(fresh, path)
    if os.path.exists(fresh) or Path(path).read_text() != "new":
        return fail("rename", "does not replace the old file", "do not use this file system")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return ok("rename", "atomic rename and exclusive creation work")
    return fail("rename", "O_EXCL made a file that was there", "do not use this file system")


def _locks(place: str, path: str, syscalls: Syscalls) -> Check:
    advice = "the root would be read-only; set exclusive: true if one process uses it alone"
    problem = locks.probe(place, syscalls)
    if problem is not None:
        return fail("locks", problem, advice)
    fd = syscalls.open(path, os.O_RDWR)
    try:
        locks.try_lock(fd)
        child = subprocess.run([sys.executable, "-c", _LOCK_IN_CHILD, path], check=False)
    finally:
        os.close(fd)
    if child.returncode:
        return fail("locks", "another process got a lock that was held", advice)
    return ok("locks", "flock excludes other processes of this host")
