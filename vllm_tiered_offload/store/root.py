# SPDX-License-Identifier: Apache-2.0
"""One directory: its geometry, its lock, its bound.

::

    root.json                      format, page_bytes, segment_bytes, max_bytes
    root.lock                      the one lock; holds the next sequence number
    namespaces/<fingerprint>.json  what a namespace stands for; locked while a private one lives
    segments/000000.seg            slots 0 .. N-1
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store import locks
from vllm_tiered_offload.store.api import StoreError, StoreSettings
from vllm_tiered_offload.store.geometry import (
    LARGEST_SEGMENT_BYTES,
    MOST_CHUNKS,
    MOST_SLOTS,
    SLACK_BYTES,
    SLOT_OVERHEAD_BYTES,
    Geometry,
    choose_segment_bytes,
    least_slots,
    read_geometry,
    segment_bytes_needed,
    write_geometry,
)
from vllm_tiered_offload.store.locks import RootLock
from vllm_tiered_offload.store.syscalls import Syscalls, explain

logger = logging.getLogger("vllm.tiered_offload.store")

OLD_PROBE_SECONDS = 60.0


class Root:
    """Paths and numbers of one root. ``open_root`` makes one."""

    def __init__(
        self,
        path: Path,
        geometry: Geometry,
        min_free_bytes: int,
        lock: RootLock,
        file_system_bytes: int,
    ) -> None:
        self.path = str(path)
        self.segments_dir = f"{self.path}/segments"
        self.namespaces_dir = f"{self.path}/namespaces"
        self.geometry = geometry
        self.min_free_bytes = min_free_bytes
        self.lock = lock
        self.file_system_bytes = file_system_bytes  # used and free
        self.foreign_bytes = 0
        self.read_only_because: str | None = None

    def slot_path(self, slot: int) -> str:
        return f"{self.segments_dir}/{slot:06d}.seg"

    @property
    def slots(self) -> int:
        """N: slots with this number or a higher one are over the bound."""
        geometry = self.geometry
        if geometry.max_bytes is None:
            return MOST_SLOTS
        room = geometry.max_bytes - SLACK_BYTES - self.foreign_bytes
        return max(0, min(MOST_SLOTS, room // (geometry.segment_bytes + SLOT_OVERHEAD_BYTES)))

    @property
    def bytes_when_full(self) -> int:
        """About how much the store takes in the end, bounded or not."""
        most = max(0, self.file_system_bytes - self.min_free_bytes)
        return most if self.geometry.max_bytes is None else min(most, self.geometry.max_bytes)

    @property
    def slots_when_full(self) -> int:
        """About how many segments there are then: N, unless the file system ends before."""
        return min(self.slots, self.bytes_when_full // self.geometry.segment_bytes)

    def measure_foreign(self) -> None:
        """Counts what lies under the root and is no slot: it takes from the bound.

        So does the part of an over-long segment that is past its end.
        """
        total, segment_bytes = 0, self.geometry.segment_bytes
        for directory, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(OSError):
                    found = os.lstat(f"{directory}/{name}")
                    allocated = found.st_blocks * 512
                    if directory == self.segments_dir and slot_number(name) is not None:
                        allocated -= segment_bytes + SLOT_OVERHEAD_BYTES
                    total += max(0, allocated)
        self.foreign_bytes = total

    def reload(self) -> bool:
        """Follows a root.json that another process has changed. True if it did."""
        geometry = read_geometry(self.path)
        if geometry is None or geometry == self.geometry:
            return False
        self.geometry = geometry
        return True


def slot_number(name: str) -> int | None:
    """The number in a slot's file name; None for any other name."""
    stem, dot, suffix = name.partition(".")
    if dot and suffix == "seg" and len(stem) == 6 and stem.isdecimal() and stem.isascii():
        return int(stem)
    return None


def open_root(
    path: Path,
    settings: StoreSettings,
    chunk_bytes: int,
    syscalls: Syscalls,
    page_bytes: int,
) -> Root:
    """Opens a root, makes it where it is missing, and settles its geometry.

    Raises StoreError, in one line, for a root that cannot serve these settings.
    """
    try:
        return _open_root(path, settings, chunk_bytes, syscalls, page_bytes)
    except StoreError:
        raise
    except OSError as error:
        where = error.filename or path
        raise StoreError(f"root_dir {path}: {explain(error)} ({where})") from error


def _open_root(
    path: Path,
    settings: StoreSettings,
    chunk_bytes: int,
    syscalls: Syscalls,
    page_bytes: int,
) -> Root:
    lock = RootLock(f"{path}/root.lock", syscalls)
    if path.exists() and not path.is_dir():
        raise StoreError(f"root_dir {path} is not a directory")
    if settings.mode == "read":
        return _open_to_read(path, syscalls, page_bytes, lock)
    for directory in (path, path / "segments", path / "namespaces"):
        _make_private_dir(directory)
    _remove_old_probes(path)
    problem = locks.probe(str(path), syscalls)
    lock.works = problem is None
    with lock.hold():
        geometry = _settle_geometry(path, settings, chunk_bytes, syscalls, page_bytes)
    total, min_free = syscalls.total_bytes(str(path)), settings.min_free_bytes
    if min_free is None:
        min_free = total // 10 if settings.max_bytes is None else 0
    root = Root(path, geometry, min_free, lock, total)
    root.read_only_because = None if settings.exclusive else problem
    root.measure_foreign()
    _require_room(root, settings, chunk_bytes)
    return root


def _open_to_read(path: Path, syscalls: Syscalls, page_bytes: int, lock: RootLock) -> Root:
    if not path.is_dir():
        raise StoreError(f"root_dir {path} does not exist, and mode 'read' creates nothing")
    found = read_geometry(str(path)) or Geometry(page_bytes, LARGEST_SEGMENT_BYTES, None)
    root = Root(path, found, 0, lock, syscalls.total_bytes(str(path)))
    root.read_only_because = "mode is 'read'"
    return root


def _remove_old_probes(path: Path) -> None:
    """Probe files of processes killed in the middle of a probe."""
    for entry in os.scandir(path):
        if entry.name.startswith((".lock-probe-", ".direct-probe-")):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > OLD_PROBE_SECONDS:
                    os.unlink(entry.path)


def _make_private_dir(path: Path) -> None:
    """0700 whatever the umask; a directory that is there keeps its mode."""
    if path.is_symlink() and path.name in ("segments", "namespaces"):
        raise StoreError(f"{path} is a symbolic link; the store does not follow one")
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)


def _settle_geometry(
    path: Path,
    settings: StoreSettings,
    chunk_bytes: int,
    syscalls: Syscalls,
    page_bytes: int,
) -> Geometry:
    """What is there stays while segments are; the bound is the newest process's."""
    found = read_geometry(str(path))
    used = any(slot_number(entry.name) is not None for entry in os.scandir(path / "segments"))
    if found is not None and used:
        size, page_bytes = found.segment_bytes, found.page_bytes
        if settings.segment_bytes not in (None, size):
            raise StoreError(
                f"segment_bytes = {settings.segment_bytes}, but the segments of {path} "
                f"have {size} bytes"
            )
    else:
        page_bytes = max(page_bytes, direct_page_bytes(path, syscalls))
        budget = settings.max_bytes or syscalls.total_bytes(str(path))
        least = least_slots(settings)
        size = choose_segment_bytes(
            budget, chunk_bytes, page_bytes, least, settings.segment_bytes
        )
    geometry = Geometry(page_bytes, size, settings.max_bytes)
    if geometry != found:
        if found is not None and found.max_bytes != settings.max_bytes:
            logger.info(
                "%s: max_bytes is now %s, was %s", path, settings.max_bytes, found.max_bytes
            )
        write_geometry(str(path), geometry)
    return geometry


def direct_page_bytes(path: Path, syscalls: Syscalls) -> int:
    """The unit of offsets that direct I/O wants here; 0 where nobody says."""
    fd = syscalls.open(f"{path}/root.lock", os.O_RDONLY)
    try:
        wanted = syscalls.direct_alignment(fd)
    finally:
        os.close(fd)
    return wanted.offset if wanted is not None else 0


def _require_room(root: Root, settings: StoreSettings, chunk_bytes: int) -> None:
    geometry = root.geometry
    needed = segment_bytes_needed(chunk_bytes, 1, geometry.page_bytes)
    if geometry.segment_bytes < needed:
        raise StoreError(
            f"root_dir {root.path}: segments of {geometry.segment_bytes} bytes cannot hold a "
            f"chunk of {chunk_bytes} bytes; use another root_dir, or segment_bytes of {needed} "
            "or more in an empty one"
        )
    most = MOST_CHUNKS * fmt.round_up(chunk_bytes, geometry.page_bytes)
    if geometry.segment_bytes > most:
        raise StoreError(
            f"root_dir {root.path}: segment_bytes = {geometry.segment_bytes} is more than "
            f"{MOST_CHUNKS} chunks of {chunk_bytes} bytes; use {most} or less"
        )
    least = least_slots(settings)
    if root.slots < least:
        per_slot = geometry.segment_bytes + SLOT_OVERHEAD_BYTES
        enough = SLACK_BYTES + root.foreign_bytes + least * per_slot
        raise StoreError(
            f"root_dir {root.path}: max_bytes = {geometry.max_bytes} holds {root.slots} "
            f"segments of {geometry.segment_bytes} bytes, {least} are needed; "
            f"use {enough} or more"
        )
    if geometry.max_bytes is None and root.min_free_bytes >= root.file_system_bytes:
        raise StoreError(
            f"min_free_bytes = {root.min_free_bytes} is more than the file system of "
            f"{root.path} has"
        )
