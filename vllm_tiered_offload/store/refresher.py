# SPDX-License-Identifier: Apache-2.0
"""What is in the root: at the start, and what other processes changed since.

A refresh is one stat of the directory and a look at the segments that others still write;
the directory is listed only when it changed.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store import locks
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.recovery import Kind, SegmentReader
from vllm_tiered_offload.store.segment import Segment, State

logger = logging.getLogger("vllm.tiered_offload.store")

# A directory changed twice within one tick of the file system's clock shows one time.
CLOCK_GRAIN = 2.0
LIST_ANYWAY_AFTER = 30  # refreshes: a network file system may show an old time
REMEMBER_OTHERS = 600.0  # seconds a new segment of another process stands for more to come
MEASURE_AFTER = 60  # refreshes between two looks at what else lies under the root
RECOVERY_THREADS = 8
RECOVERY_WINDOW = 32  # footers in memory at once
_YIELD_AFTER = 64  # files


class Refresher:
    """Keeps catalogue and index in step with the files. One thread at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._readers = threading.local()
        self._listed_at: tuple[int, int] = (0, 0)  # directory's mtime, wall clock then
        self._refreshes = 0
        self._recovering = False
        self.turn = threading.Lock()  # held during a refresh
        self._reported: dict[str, tuple[int, int]] = {}  # odd files already counted

    def recover(self) -> None:
        """Everything there is, oldest first, so that the youngest copy of a chunk wins.

        Raises OSError when the directory cannot be read.
        """
        self._parts.catalogue.clear()
        self._reported.clear()
        self._listed_at = (0, 0)
        self._recovering = True
        try:
            # Many small reads: their latencies overlap, the work of Python does not.
            with ThreadPoolExecutor(RECOVERY_THREADS, "vto-recover") as pool:
                self._list(pool)
                self._read_all(pool)
        finally:
            self._recovering = False

    def _read_all(self, pool: ThreadPoolExecutor) -> None:
        segments = [found for found in self._parts.catalogue.all() if found.ordinal >= 0]
        segments.sort(key=lambda found: found.sequence)
        for start in range(0, len(segments), RECOVERY_WINDOW):
            window = segments[start : start + RECOVERY_WINDOW]
            for segment, records in zip(window, pool.map(self._footer_of, window), strict=True):
                if records is None:
                    self._look_at(segment)
                else:
                    self._take(segment, records)
                    segment.state = State.CLOSED

    def _footer_of(self, segment: Segment) -> fmt.Records | None:
        """The records of a sealed segment; None for all that needs a closer look."""
        try:
            fd = self._parts.io.open(segment.path, os.O_RDONLY)
        except OSError:
            return None
        try:
            if self._has_writer(fd, segment.header):
                return None
            return self._reader.footer(fd, segment.header)
        except (OSError, fmt.FormatError):
            return None
        finally:
            os.close(fd)

    def refresh(self) -> bool:
        """One round; True if files came or went. Raises OSError when the root is unreadable."""
        with self.turn, self._parts.watch.operation():
            self._refreshes += 1
            changed = self._parts.root.reload()
            if self._refreshes % MEASURE_AFTER == 0:
                self._parts.root.measure_foreign()
            if self._directory_changed():
                self._list()
                changed = True
            for segment in self._parts.catalogue.all():
                if segment.ordinal >= 0 and segment.state is State.OPEN:
                    self._look_at(segment)
            return changed

    def _directory_changed(self) -> bool:
        mtime = self._directory_time()
        seen, at = self._listed_at
        recent = at - mtime < CLOCK_GRAIN * 1e9
        return mtime != seen or recent or self._refreshes % LIST_ANYWAY_AFTER == 0

    def _list(self, pool: ThreadPoolExecutor | None = None) -> None:
        self._listed_at = (self._directory_time(), time.time_ns())
        # Before the listing: a segment that a writer adds meanwhile is no missing file.
        known = self._parts.catalogue.all()
        try:
            files = self._parts.slots.list()
        except FileNotFoundError:  # not made yet, or unmounted: nothing to be found in either
            files = {}
        present = set(files.values())
        for segment in known:
            if segment.path not in present and not self._exists(segment.path):
                self._parts.lose(segment)
        self._parts.catalogue.leftovers.intersection_update(present)
        self._parts.catalogue.strangers.intersection_update(present)
        if pool is not None:
            for _ in pool.map(self._compare, files.values()):
                pass
            return
        for number, path in enumerate(files.values()):
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
            return  # its times change as it is written; _look_at compares headers
        try:
            info = self._parts.syscalls.stat(path)
            identity = (info.st_ino, info.st_ctime_ns)
            if known is not None and known.identity == identity:
                return
            if not stat.S_ISREG(info.st_mode):  # opening a device or a FIFO does something
                self._odd(path, Kind.STRANGE, identity)
                return
            if self._reported.get(path) != identity:
                self._examine(path, known, identity)
        except FileNotFoundError:
            return
        except OSError as error:
            self._parts.catalogue.find_odd(path, leftover=False)
            self._report(path, (0, 0), "unreadable", str(error))

    def _examine(self, path: str, known: Segment | None, identity: tuple[int, int]) -> None:
        parts = self._parts
        fd = parts.io.open(path, os.O_RDONLY)
        try:
            kind, header = self._reader.identify(fd)
        finally:
            os.close(fd)
        if known is not None:
            if header is not None and header.sequence == known.sequence:
                known.identity = identity
                return
            self._parts.lose(known)
        if header is None:
            self._odd(path, kind, identity)
            return
        parts.slots.note_sequence(header.sequence)
        segment = Segment(parts.number, path, header, State.CLOSED)
        segment.identity = identity
        # Whether another namespace's segment still has a writer is for its lock to say,
        # when it comes to evicting it.
        if self._is_ours(header):
            segment.state = State.OPEN
            parts.index.register(segment)
        if not parts.found(segment):
            parts.index.drop(segment)
        elif not self._recovering:  # not there at the start: somebody else is storing
            parts.others_store_until = parts.clock() + REMEMBER_OTHERS

    @property
    def _reader(self) -> SegmentReader:
        """This thread's: a reader has one buffer."""
        reader: SegmentReader | None = getattr(self._readers, "reader", None)
        if reader is None:
            reader = self._readers.reader = SegmentReader(self._parts.io)
        return reader

    def _is_ours(self, header: fmt.PageBlock) -> bool:
        parts = self._parts
        same_pages = header.page_bytes == parts.root.geometry.page_bytes
        return (
            header.fingerprint == parts.namespace.fingerprint
            and header.chunk_bytes == parts.chunk_bytes
            and same_pages
        )

    def _look_at(self, segment: Segment) -> None:
        """Reads what is new in a segment that was open when last seen."""
        try:
            fd = self._parts.io.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:
            self._parts.lose(segment)
            return
        except OSError as error:
            self._report(segment.path, (0, 0), "unreadable", str(error))
            return
        try:
            kind, header = self._reader.identify(fd)
            if kind is not Kind.SEGMENT or header is None or header != segment.header:
                self._parts.lose(segment)
            elif self._has_writer(fd, header):
                self._follow(fd, segment)
            else:
                self._finish(fd, segment)
                info = os.fstat(fd)
                segment.identity = (info.st_ino, info.st_ctime_ns)
        except OSError as error:  # one bad sector: the other segments are none the worse
            self._report(segment.path, (0, 0), "unreadable", str(error))
        finally:
            os.close(fd)

    def _has_writer(self, fd: int, header: fmt.PageBlock) -> bool:
        """A header without a lock has no living writer: it is written under the lock.

        Where locks do not work, nobody else is there (exclusive), or only a trailer can tell.
        """
        if not self._parts.root.lock.works:
            return not self._parts.settings.exclusive and not self._reader.is_sealed(fd, header)
        try:
            if not locks.try_lock(fd, shared=True):
                return True
            locks.unlock(fd)
        except OSError:
            return True
        return False

    def _follow(self, fd: int, segment: Segment) -> None:
        """Takes the extents that a living writer has declared readable."""
        scan = self._reader.scan(fd, segment.header, segment.scanned_to)
        for extent in scan.extents:
            if extent.end <= scan.committed:
                self._take(segment, extent.records)
        segment.scanned_to = max(segment.scanned_to, scan.committed)

    def _finish(self, fd: int, segment: Segment) -> None:
        """Nobody writes it any more: footer if there is one, else all that can be trusted."""
        try:
            records = self._reader.footer(fd, segment.header)
        except (OSError, fmt.FormatError) as error:
            self._report(segment.path, (0, 0), "footer", str(error))
            records = None
        try:
            if records is not None:
                self._take(segment, records[len(segment.keys) :])
            else:
                self._adopt(fd, segment)
        finally:
            segment.state = State.CLOSED

    def _adopt(self, fd: int, segment: Segment) -> None:
        """A dead writer's: above its last mark only payloads that prove themselves."""
        scan = self._reader.scan(fd, segment.header, segment.scanned_to)
        for extent in scan.extents:
            records = extent.records
            if extent.end > scan.committed:
                records = records[self._reader.payloads_match(fd, segment.header, records)]
            self._take(segment, records)
        segment.scanned_to = scan.next_offset
        self._parts.counters.add(adopted_segments=1)

    def _take(self, segment: Segment, records: fmt.Records) -> None:
        keys = fmt.record_keys(records)
        index = self._parts.index
        # Recovery goes from the oldest to the youngest: the last place is the right one.
        enter = index.add if self._recovering else index.offer
        enter(segment, keys, records["offset"], records["checksum"])

    def _odd(self, path: str, kind: Kind, identity: tuple[int, int]) -> None:
        catalogue = self._parts.catalogue
        removable = kind in (Kind.EMPTY, Kind.DAMAGED) and path not in catalogue.strangers
        catalogue.find_odd(path, leftover=removable)
        if kind is Kind.NEWER:
            self._report(path, identity, "newer", "written by a newer version; left alone")
        elif kind is Kind.DAMAGED:
            self._report(path, identity, "header", "no valid header")

    def _report(self, path: str, identity: tuple[int, int], what: str, detail: str) -> None:
        """Counts and logs an odd file, once for each state it is seen in."""
        if self._reported.get(path) == identity:
            return
        if len(self._reported) > 10_000:
            self._reported.clear()
        self._reported[path] = identity
        self._parts.counters.count("newer_segments" if what == "newer" else f"damaged.{what}")
        logger.warning("%s: %s: %s", path, what, detail)
