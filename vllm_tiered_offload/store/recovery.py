# SPDX-License-Identifier: Apache-2.0
"""Reading segments back: header, footer, or extent by extent.

Works on open descriptors and writes nothing. Files are the truth; whatever does not
check out is left out.
"""

from __future__ import annotations

import enum
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.direct_io import BlockIO, page_aligned

_READ_BYTES = 256 << 10  # a trailer with its footer, or a table, comes in one read as a rule


class Kind(enum.Enum):
    """What a file in a slot turned out to be."""

    SEGMENT = "segment"
    EMPTY = "empty"  # being made, being removed, or left by a crash
    NEWER = "newer"  # of a later format version: not ours to judge
    DAMAGED = "damaged"  # no valid header
    STRANGE = "strange"  # not a regular file


@dataclass(frozen=True, slots=True)
class Extent:
    """The records of one extent and where it ends."""

    records: fmt.Records
    end: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What an unsealed segment holds from some offset on."""

    extents: list[Extent]
    committed: int  # extents that end at or below this are good for everyone
    next_offset: int  # where the next table will be


class SegmentReader:
    """Reads the tables of segments of one root. One thread at a time."""

    def __init__(self, io: BlockIO) -> None:
        self._io = io
        self._buffer = page_aligned(_READ_BYTES)

    def identify(self, fd: int) -> tuple[Kind, fmt.PageBlock | None]:
        """What the file is, and its header if that can be read. Raises OSError."""
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return Kind.STRANGE, None
        page = self._read(fd, 0, fmt.MIN_PAGE_BYTES)
        try:
            header = fmt.unpack_page_block(page, fmt.SEGMENT_MAGIC)
        except fmt.NewerFormatError:
            return Kind.NEWER, None
        except fmt.FormatError:
            # A header of zeros belongs to a file that is being made or never was finished.
            return (Kind.DAMAGED if any(page) else Kind.EMPTY), None
        if header.segment_bytes < 4 * header.page_bytes or header.offset:
            return Kind.DAMAGED, None
        return Kind.SEGMENT, header

    def is_sealed(self, fd: int, header: fmt.PageBlock) -> bool:
        """Whether there is a trailer, good or bad."""
        return any(self._read(fd, header.segment_bytes - header.page_bytes, header.page_bytes))

    def footer(self, fd: int, header: fmt.PageBlock) -> fmt.Records | None:
        """All records of a sealed segment; None if it is not sealed. FormatError if damaged."""
        page = header.page_bytes
        trailer_at = header.segment_bytes - page
        start = max(page, trailer_at - min(_READ_BYTES, _largest_table(header)) // page * page)
        tail = self._read(fd, start, header.segment_bytes - start)
        last = tail[trailer_at - start :]
        if not any(last):
            return None
        trailer = fmt.unpack_page_block(last, fmt.TRAILER_MAGIC)
        same = (trailer.sequence, trailer.offset) == (header.sequence, trailer_at)
        if not same or not page <= trailer.at <= trailer_at - trailer.length:
            raise fmt.FormatError("the trailer is of another segment")
        if trailer.at >= start:
            table = tail[trailer.at - start : trailer_at - start]
        else:
            table = self._read(fd, trailer.at, trailer.length)
        found, records = fmt.unpack_table(table, fmt.FOOTER_MAGIC, trailer.at, page)
        if found.sequence != header.sequence:
            raise fmt.FormatError("the footer is of another segment")
        _check_offsets(records, header, trailer.at)
        return records.copy()  # the buffer is used again

    def scan(self, fd: int, header: fmt.PageBlock, start: int) -> Scan:
        """Reads extents from ``start`` to the first place where there is none (yet)."""
        extents: list[Extent] = []
        committed, offset = 0, start
        for table, records in self._tables(fd, header, start):
            committed = max(committed, table.committed)
            offset = _extent_end(table, header)
            if table.count:
                extents.append(Extent(records, offset))
        return Scan(extents, committed, offset)

    def payloads_match(
        self, fd: int, header: fmt.PageBlock, records: fmt.Records
    ) -> list[bool]:
        """Which payloads have the checksum of their record. Raises OSError."""
        stride = fmt.round_up(header.chunk_bytes, header.page_bytes)
        keys = fmt.record_keys(records)
        buffer = page_aligned(stride)
        verdicts = []
        columns = (records["offset"].tolist(), records["checksum"].tolist())
        for key, offset, checksum in zip(keys, *columns, strict=True):
            count = self._io.read(fd, [buffer], offset)
            seed = fmt.payload_seed(header.fingerprint, key)
            payload = buffer[: header.chunk_bytes]
            verdicts.append(count == stride and fmt.digest(payload, seed) == checksum)
        return verdicts

    def _tables(
        self, fd: int, header: fmt.PageBlock, offset: int
    ) -> Iterator[tuple[fmt.TableHeader, fmt.Records]]:
        page, start = header.page_bytes, offset
        trailer_at = header.segment_bytes - page
        while offset < trailer_at:
            length = min(_READ_BYTES, _largest_table(header), trailer_at - offset)
            try:
                table = self._read(fd, offset, length // page * page)
                front = fmt.unpack_table_header(table, fmt.EXTENT_MAGIC, offset)
                if front.pages * page > len(table):
                    table = self._read(fd, offset, min(front.pages * page, trailer_at - offset))
                found, records = fmt.unpack_table(table, fmt.EXTENT_MAGIC, offset, page)
                end = _extent_end(found, header)
                if found.sequence != header.sequence or end > trailer_at:
                    return
                _check_offsets(records, header, trailer_at)
            except fmt.FormatError:
                return
            except OSError:  # a bad sector ends what can be read, as a damaged table does
                if offset == start:
                    raise
                return
            yield found, records.copy()
            offset = end

    def _read(self, fd: int, offset: int, length: int) -> memoryview:
        """At most ``length`` bytes; fewer at the end of the file."""
        if length > len(self._buffer):
            self._buffer = page_aligned(fmt.round_up(length, _READ_BYTES))
        part = self._buffer[:length]
        return part[: self._io.read(fd, [part], offset)]


def _largest_table(header: fmt.PageBlock) -> int:
    """No table of the segment is longer: few bytes where chunks are large."""
    stride = fmt.round_up(header.chunk_bytes, header.page_bytes)
    return fmt.table_bytes(header.segment_bytes // stride, header.page_bytes)


def _extent_end(table: fmt.TableHeader, header: fmt.PageBlock) -> int:
    stride = fmt.round_up(header.chunk_bytes, header.page_bytes)
    return table.offset + table.pages * header.page_bytes + table.count * stride


def _check_offsets(records: fmt.Records, header: fmt.PageBlock, end: int) -> None:
    """A record must point into the file, at a page: a read goes where it says."""
    offsets = records["offset"]
    stride = fmt.round_up(header.chunk_bytes, header.page_bytes)
    bad = (offsets < header.page_bytes) | (offsets > end - stride)
    bad |= offsets % np.uint64(header.page_bytes) != 0
    bad |= (records["key_bytes"] == 0) | (records["key_bytes"] > fmt.MAX_KEY_BYTES)
    if bool(bad.any()):
        raise fmt.FormatError("a record points out of the segment")
