# SPDX-License-Identifier: Apache-2.0
"""What is in the root: at the start, and what other processes changed since.

A refresh is one stat of the directory and a look at the segments that others still write;
the directory is listed only when it changed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.follower import Follower
from vllm_tiered_offload.store.oddities import Identity, Oddities
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.recovery import Kind
from vllm_tiered_offload.store.segment import Segment, State

# A directory changed twice within one tick of the file system's clock shows one time.
CLOCK_GRAIN = 2.0
LIST_ANYWAY_AFTER = 30  # refreshes: a network file system may show an old time
REMEMBER_OTHERS = 600.0  # seconds a new segment of another process stands for more to come
MEASURE_AFTER = 60  # refreshes between two looks at what else lies under the root
RECOVERY_THREADS = 8
# What a thread reads at a time; twice as many batches as threads are in memory.
RECOVERY_BATCH, RECOVERY_BATCH_BYTES = 16, 4 << 20  # files, bytes of records
_YIELD_AFTER = 64  # files


@dataclass(frozen=True, slots=True)
class _Found:
    """A file in a slot, and its records if it is a sealed segment of the present namespace."""

    path: str
    identity: Identity
    kind: Kind
    header: fmt.PageBlock | None = None
    records: fmt.Records | None = None


class Refresher:
    """Keeps catalogue and index in step with the files. One thread at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._oddities = Oddities(parts.counters, parts.clock)
        self._follower = Follower(parts, self._oddities)
        self._listed_at: tuple[int, int] = (0, 0)  # directory's mtime, wall clock then
        self._refreshes = 0
        self.turn = threading.Lock()  # held during a refresh

    def recover(self) -> None:
        """Everything there is. Raises OSError when the directory cannot be read."""
        self._parts.catalogue.clear()
        self._oddities.clear()
        self._listed_at = (self._directory_time(), time.time_ns())
        paths, size = self._list(), self._files_per_batch()
        # Many small reads: their latencies overlap, the work of Python does not.
        with ThreadPoolExecutor(RECOVERY_THREADS, "vto-recover") as pool:
            waiting: deque[Future[list[_Found]]] = deque()
            for start in range(0, len(paths), size):
                waiting.append(pool.submit(self._read_all, paths[start : start + size]))
                if len(waiting) > 2 * RECOVERY_THREADS:
                    self._enter_all(waiting.popleft().result())
            while waiting:
                self._enter_all(waiting.popleft().result())

    def _files_per_batch(self) -> int:
        """So many that handing them over costs little, and their footers little memory."""
        geometry, stride = self._parts.root.geometry, self._parts.stride
        footer = fmt.table_bytes(geometry.segment_bytes // stride, geometry.page_bytes)
        return max(1, min(RECOVERY_BATCH, RECOVERY_BATCH_BYTES // footer))

    def _read_all(self, paths: Sequence[str]) -> list[_Found]:
        return [found for path in paths if (found := self._read(path)) is not None]

    def refresh(self) -> bool:
        """One round; True if files came or went. Raises OSError when the root is unreadable."""
        with self.turn, self._parts.watch.operation():
            self._refreshes += 1
            changed = self._parts.root.reload()
            if self._refreshes % MEASURE_AFTER == 0:
                self._parts.root.measure_foreign()
            if self._directory_changed():
                self._compare_all()
                changed = True
            for segment in self._parts.catalogue.all():
                is_open = segment.ordinal >= 0 and segment.state is State.OPEN
                if is_open and self._oddities.may_read(segment.sequence):
                    self._follower.look_at(segment)
            return changed

    def _directory_changed(self) -> bool:
        mtime = self._directory_time()
        seen, at = self._listed_at
        recent = at - mtime < CLOCK_GRAIN * 1e9
        return mtime != seen or recent or self._refreshes % LIST_ANYWAY_AFTER == 0

    def _list(self) -> list[str]:
        try:
            return list(self._parts.slots.list().values())
        except FileNotFoundError:  # not made yet, or unmounted: nothing to be found in either
            return []

    def _compare_all(self) -> None:
        self._listed_at = (self._directory_time(), time.time_ns())
        # Before the listing: a segment that a writer adds meanwhile is no missing file.
        known = self._parts.catalogue.all()
        paths = self._list()
        present = set(paths)
        for segment in known:
            if segment.path not in present and not self._exists(segment.path):
                self._parts.lose(segment)
        self._parts.catalogue.leftovers.intersection_update(present)
        self._parts.catalogue.strangers.intersection_update(present)
        for number, path in enumerate(paths):
            self._compare(path)
            if number % _YIELD_AFTER == 0:
                time.sleep(0)

    def _exists(self, path: str) -> bool:
        """A network file system may list yesterday's directory; asked for a name it looks."""
        try:
            self._parts.syscalls.stat(path)
        except FileNotFoundError:
            return False
        return True

    def _directory_time(self) -> int:
        try:
            return self._parts.syscalls.stat(self._parts.root.segments_dir).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _compare(self, path: str) -> None:
        """A slot may hold another file than last time under the same name."""
        known = self._parts.catalogue.get(path)
        if known is not None and known.state is not State.CLOSED:
            return  # its times change as it is written; the follower compares headers
        found = self._read(path, known)
        if found is None:
            return
        if known is not None:
            if found.header is not None and found.header.sequence == known.sequence:
                known.identity = found.identity
                return
            self._parts.lose(known)
        if self._enter_all([found]):  # not there at the start: somebody else is storing
            self._parts.others_store_until = self._parts.clock() + REMEMBER_OTHERS

    def _read(self, path: str, known: Segment | None = None) -> _Found | None:
        """What a file is. None if it is ``known``, gone, or was read before in vain."""
        identity = (0, 0)
        try:
            info = self._parts.syscalls.stat(path)
            identity = (info.st_ino, info.st_ctime_ns)
            if known is not None and known.identity == identity:
                return None
            if not stat.S_ISREG(info.st_mode):  # opening a device or a FIFO does something
                return _Found(path, identity, Kind.STRANGE)
            odd = self._oddities
            if odd.knows(path, identity) or not odd.may_read((path, identity)):
                return None
            return self._read_file(path, identity)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._parts.catalogue.find_odd(path, leftover=False)
            self._oddities.unreadable(path, (path, identity), error)
            return None

    def _read_file(self, path: str, identity: Identity) -> _Found:
        """With one descriptor: ten thousand segments are ten thousand of everything."""
        reader = self._follower.reader
        fd = self._parts.io.open(path, os.O_RDONLY)
        try:
            kind, header = reader.identify(fd)
            records = None
            if header is not None and self._is_ours(header):
                with contextlib.suppress(OSError, fmt.FormatError):  # for a closer look
                    records = reader.footer(fd, header)
        finally:
            os.close(fd)
        self._oddities.readable((path, identity))
        return _Found(path, identity, kind, header, records)

    def _enter_all(self, found: Iterable[_Found]) -> int:
        """Into catalogue and index; returns how many segments that were."""
        entered = 0
        for each in found:
            segment = self._enter(each)
            if segment is None:
                continue
            entered += 1
            if segment.ordinal >= 0 and each.records is None:
                self._follower.look_at(segment)
            elif each.records is not None:  # sealed: whoever has written it does so no more
                self._follower.take(segment, each.records)
                segment.state = State.CLOSED
        return entered

    def _enter(self, found: _Found) -> Segment | None:
        """The segment in the catalogue; None if it is none, or not to be there."""
        parts, header = self._parts, found.header
        if header is None:
            self._enter_odd(found)
            return None
        parts.slots.note_sequence(header.sequence)
        segment = Segment(parts.number, found.path, header, State.CLOSED)
        segment.identity = found.identity
        # Whether another namespace's segment still has a writer is for its lock to say,
        # when it comes to evicting it.
        if self._is_ours(header):
            segment.state = State.OPEN
            parts.index.register(segment)
        if parts.found(segment):
            return segment
        parts.index.drop(segment)
        return None

    def _enter_odd(self, found: _Found) -> None:
        catalogue, path, kind = self._parts.catalogue, found.path, found.kind
        removable = kind in (Kind.EMPTY, Kind.DAMAGED) and path not in catalogue.strangers
        catalogue.find_odd(path, leftover=removable)
        if kind is Kind.NEWER:
            detail = "written by a newer version; left alone"
            self._oddities.report(path, found.identity, "newer", detail)
        elif kind is Kind.DAMAGED:
            self._oddities.report(path, found.identity, "header", "no valid header")

    def _is_ours(self, header: fmt.PageBlock) -> bool:
        parts = self._parts
        same_pages = header.page_bytes == parts.root.geometry.page_bytes
        return (
            header.fingerprint == parts.namespace.fingerprint
            and header.chunk_bytes == parts.chunk_bytes
            and same_pages
        )
