# SPDX-License-Identifier: Apache-2.0
"""The directory in /dev/shm where the processes of one engine share a file.

    vllm-tiered-offload-<uid>-<engine>/region    the memory; LOCK_SH by every user
                                       claim     what its makers expect of it
                                       rank-<r>  who it is; LOCK_EX by its process

A lock on the directory serialises everything. Liveness is what the kernel
says: the locks of a process end with it, in whichever pid namespace it lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

from vllm_tiered_offload.region.forks import PrivateFd
from vllm_tiered_offload.region.rendezvous import open_private_directory

SHM = "/dev/shm"
_PREFIX = "vllm-tiered-offload-"


def _own_prefix() -> str:
    return f"{_PREFIX}{os.geteuid()}-"


def try_lock(fd: int, operation: int) -> bool:
    """flock(2) without waiting; False when others hold it."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FilePlace:
    """The directory of one engine; every method but `locked` is for its holder."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.region_path = os.path.join(path, "region")

    @classmethod
    def of(cls, name: str, base: str = SHM) -> FilePlace:
        return cls(os.path.join(base, _own_prefix() + name[:24]))

    @contextlib.contextmanager
    def locked(self, make: bool) -> Iterator[bool]:
        """Hold the directory's lock; yields False when there is no directory to lock."""
        lock = self._lock(make)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.close()

    def _lock(self, make: bool) -> PrivateFd | None:
        while make or os.path.isdir(self.path):
            try:
                lock = PrivateFd(open_private_directory(self.path))
            except FileNotFoundError:
                continue  # removed between making and opening it
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            if self._is(self.path, lock.fileno()):
                return lock
            lock.close()  # its last user removed it while this one waited
        return None

    @staticmethod
    def _is(path: str, fd: int) -> bool:
        """Whether `path` still names the file that `fd` has open."""
        mine = os.fstat(fd)
        try:
            there = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def names(self, fd: int) -> bool:
        """Whether the region here is the one that `fd` has open."""
        return self._is(self.region_path, fd)

    def open(self, name: str, flags: int = 0) -> PrivateFd:
        path = os.path.join(self.path, name)
        return PrivateFd(os.open(path, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def in_use(self) -> bool:
        """Whether any living process has the region."""
        return self._is_held("region")

    def remove(self) -> None:
        """Remove the region and everything that belongs to it."""
        for name in os.listdir(self.path):
            os.unlink(os.path.join(self.path, name))
        os.rmdir(self.path)

    def write(self, fd: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)

    def read(self, name: str) -> dict[str, Any]:
        """The value in a file of ours; {} when there is none."""
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                return dict(json.loads(file.read()))
        except (FileNotFoundError, ValueError):
            return {}

    def is_alive(self, rank: int) -> bool:
        """Whether the process that joined as `rank` still lives."""
        return self._is_held(f"rank-{rank}")

    def _is_held(self, name: str) -> bool:
        """Whether a living process has a lock on that file."""
        try:
            probe = self.open(name)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(probe.fileno(), fcntl.LOCK_EX)
        finally:
            probe.close()


def sweep(base: str = SHM) -> list[str]:
    """Remove what dead engines of this user left; returns the paths.

    Only directories by our name, of our user, that no living process has
    locked. vLLM's own files have other names and are never touched.
    """
    removed = []
    with contextlib.suppress(OSError):
        for name in os.listdir(base):
            place = FilePlace(os.path.join(base, name))
            if name.startswith(_own_prefix()) and _sweep_one(place):
                removed.append(place.path)
    return removed


def _sweep_one(place: FilePlace) -> bool:
    try:
        lock = PrivateFd(open_private_directory(place.path))
    except OSError:
        return False
    try:
        # Whoever waits for this lock re-checks the directory once it has it.
        if not try_lock(lock.fileno(), fcntl.LOCK_EX) or place.in_use():
            return False
        place.remove()
    except OSError as error:
        return error.errno == errno.ENOENT
    finally:
        lock.close()
    return True
