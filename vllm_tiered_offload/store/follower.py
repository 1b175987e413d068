# SPDX-License-Identifier: Apache-2.0
"""From the tables of one segment, whoever wrote it, to the index."""

from __future__ import annotations

import os
import threading

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store import locks
from vllm_tiered_offload.store.oddities import Oddities
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.recovery import Kind, SegmentReader
from vllm_tiered_offload.store.segment import Segment, State


class Follower:
    """Reads what is new in segments of the present namespace. Any number of threads, each at
    a segment of its own."""

    def __init__(self, parts: Parts, oddities: Oddities) -> None:
        self._parts = parts
        self._oddities = oddities
        self._readers = threading.local()

    @property
    def reader(self) -> SegmentReader:
        """This thread's: a reader has one buffer."""
        reader: SegmentReader | None = getattr(self._readers, "reader", None)
        if reader is None:
            reader = self._readers.reader = SegmentReader(self._parts.io)
        return reader

    def look_at(self, segment: Segment) -> None:
        """Takes what is new in a segment that was open when last seen."""
        try:
            fd = self._parts.io.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:
            self._parts.lose(segment)
            return
        except OSError as error:
            self._oddities.unreadable(segment.path, segment.sequence, error)
            return
        try:
            self._read(fd, segment)
            self._oddities.readable(segment.sequence)
        except OSError as error:  # one bad sector: the other segments are none the worse
            self._oddities.unreadable(segment.path, segment.sequence, error)
        finally:
            os.close(fd)

    def take(self, segment: Segment, records: fmt.Records) -> None:
        """Enters records that nobody has to prove any more."""
        keys = fmt.record_keys(records)
        self._parts.index.offer(segment, keys, records["offset"], records["checksum"])

    def _read(self, fd: int, segment: Segment) -> None:
        kind, header = self.reader.identify(fd)
        if kind is not Kind.SEGMENT or header is None or header != segment.header:
            self._parts.lose(segment)
        elif self._has_writer(fd, header):
            self._follow(fd, segment)
        else:
            self._finish(fd, segment)
            info = os.fstat(fd)
            segment.identity = (info.st_ino, info.st_ctime_ns)

    def _has_writer(self, fd: int, header: fmt.PageBlock) -> bool:
        """A header without a lock has no living writer: it is written under the lock.

        Where locks do not work, nobody else is there (exclusive), or only a trailer can tell.
        """
        if not self._parts.root.lock.works:
            return not self._parts.settings.exclusive and not self.reader.is_sealed(fd, header)
        try:
            if not locks.try_lock(fd, shared=True):
                return True
            locks.unlock(fd)
        except OSError:
            return True
        return False

    def _follow(self, fd: int, segment: Segment) -> None:
        """Takes the extents that a living writer has declared readable."""
        scan = self.reader.scan(fd, segment.header, segment.scanned_to)
        for extent in scan.extents:
            if extent.end <= scan.committed:
                self.take(segment, extent.records)
        segment.scanned_to = max(segment.scanned_to, scan.committed)

    def _finish(self, fd: int, segment: Segment) -> None:
        """Nobody writes it any more: footer if there is one, else all that can be trusted."""
        try:
            records = self.reader.footer(fd, segment.header)
        except (OSError, fmt.FormatError) as error:
            self._oddities.report(segment.path, (0, 0), "footer", str(error))
            records = None
        try:
            if records is not None:
                self.take(segment, records[len(segment.keys) :])
            else:
                self._adopt(fd, segment)
        finally:
            segment.state = State.CLOSED

    def _adopt(self, fd: int, segment: Segment) -> None:
        """A dead writer's: above its last mark only payloads that prove themselves."""
        scan = self.reader.scan(fd, segment.header, segment.scanned_to)
        for extent in scan.extents:
            records = extent.records
            if extent.end > scan.committed:
                records = records[self.reader.payloads_match(fd, segment.header, records)]
            self.take(segment, records)
        segment.scanned_to = scan.next_offset
        self._parts.counters.add(adopted_segments=1)
