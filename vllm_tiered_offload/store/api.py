# SPDX-License-Identifier: Apache-2.0
"""The store's vocabulary: what goes in, what comes out, what can go wrong.

Sizes are integers in bytes, times are floats in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20


class StoreError(OSError):
    """A store cannot be opened or used as asked; the message is one line."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may share chunks.

    ``fingerprint`` is lower-case hex, 32 to 64 digits; ``manifest`` is what it
    stands for, written beside the data for people and tools. A ``private``
    namespace belongs to this process alone: its segments are evicted before
    all others once the process is gone.
    """

    fingerprint: str
    manifest: Mapping[str, object] = field(default_factory=dict)
    private: bool = False

    def __post_init__(self) -> None:
        digits = self.fingerprint
        if not 32 <= len(digits) <= 64 or set(digits) - set("0123456789abcdef"):
            raise StoreError(
                f"fingerprint {digits!r} must be 32 to 64 lower-case hexadecimal digits"
            )


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a store behaves; every limit is per root unless it says otherwise."""

    root_dirs: tuple[Path, ...]
    max_bytes: int | None = None
    min_free_bytes: int | None = None
    io_bytes: int = 16 * MIB
    read_threads: int = 4
    write_threads: int | None = None  # None: what the root is large enough for, 1 or 2
    store_queue_bytes: int = 512 * MIB
    refresh_interval: float = 1.0
    stall_timeout: float = 10.0
    mode: str = "read_write"
    direct_io: str = "auto"
    exclusive: bool = False
    segment_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.root_dirs:
            raise StoreError("root_dirs is empty; name at least one directory")
        if len(set(self.root_dirs)) != len(self.root_dirs):
            raise StoreError(f"root_dirs names a directory twice: {self.root_dirs}")
        for name in ("io_bytes", "read_threads", "store_queue_bytes"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        if self.write_threads is not None:
            self._require("write_threads", self.write_threads >= 1, "at least 1")
        for name in ("max_bytes", "min_free_bytes", "segment_bytes"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 0, "a number of bytes")
        for name in ("refresh_interval", "stall_timeout"):
            self._require(name, getattr(self, name) > 0, "more than 0 seconds")
        self._require("mode", self.mode in ("read_write", "read"), "'read_write' or 'read'")
        self._require("direct_io", self.direct_io in ("auto", "on", "off"), "auto, on or off")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise StoreError(f"{name} = {getattr(self, name)!r} must be {wanted}")


@dataclass(frozen=True, slots=True)
class Completion:
    """The one report of a job.

    A load is ``ok`` when every chunk arrived; otherwise ``loaded_keys`` names
    those that did. A store is not ``ok`` only when an error kept all of it from
    the disk; chunks left out on purpose (full disk, full queue, read mode) are
    counted in ``StoreStats.dropped_chunks`` by reason. ``bytes`` moved to or from the
    disk for it, ``seconds`` since it was submitted.
    """

    job_id: int
    is_load: bool
    ok: bool
    loaded_keys: tuple[bytes, ...] | None
    bytes: int
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """Keys that became readable here, or stopped being so."""

    removed: bool
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RootStats:
    """One root: gauges as they are now, counters since this process opened it."""

    path: str
    healthy: bool  # last operations worked and none is older than stall_timeout
    stalled: bool
    paused: str | None  # why nothing is stored at present
    direct_read: bool  # as read back from the last descriptor opened to read
    direct_write: bool  # ... and to write
    oldest_seconds: float  # how long the oldest call in flight has been running
    slots: int
    used_slots: int
    segment_bytes: int
    max_bytes: int | None
    resident_bytes: int  # of all segments, whoever wrote them
    free_bytes: int  # of the file system, when last refreshed
    free_inodes: int
    chunks: int  # readable through this process
    recovered_chunks: int  # of those, found when the namespace was opened
    recovery_seconds: float
    queued_store_bytes: int
    queued_loads: int
    counters: Mapping[str, int]  # see counters.py for the names


@dataclass(frozen=True, slots=True)
class StoreStats:
    """All roots together. Counters only ever grow; gauges are marked as such."""

    chunks: int  # gauge: keys in the index
    pending_jobs: int  # gauge
    queued_store_bytes: int  # gauge
    stalled: bool  # gauge
    stored_chunks: int
    stored_bytes: int
    loaded_chunks: int
    loaded_bytes: int
    evicted_chunks: int
    evicted_segments: int
    copied_chunks: int
    written_bytes: int  # everything sent to the disks: payload, records, copies, marks
    read_bytes: int  # everything asked of the disks
    write_seconds: float  # inside write calls
    read_seconds: float  # inside read calls
    dropped_chunks: Mapping[str, int]  # by reason; not stored on purpose
    failed_chunks: Mapping[str, int]  # by reason; looked for and not served
    roots: tuple[RootStats, ...]
