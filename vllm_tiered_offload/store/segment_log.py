# SPDX-License-Identifier: Apache-2.0
"""A segment while this process fills it: append, mark, seal.

One writer thread, one write in flight. Whatever fails, nothing is written over: the log is
closed where its last good write ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from vllm_tiered_offload.store import faults, locks
from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.direct_io import IOV_MAX, BlockIO, page_aligned
from vllm_tiered_offload.store.segment import Segment, State

_NO_RECORDS = np.zeros(0, fmt.RECORD)


class SegmentLog:
    """The open end of one segment. Owns the locked descriptor."""

    def __init__(self, segment: Segment, fd: int, io: BlockIO) -> None:
        self.segment = segment
        self.end = segment.header.page_bytes  # everything below it is written
        self.marked_to = self.end  # everything below it may be read by others
        self._fd = fd
        self._io = io
        self._page = segment.header.page_bytes
        self._records: list[fmt.Records] = []  # one array an extent
        self._count = 0
        self._pad = segment.stride - segment.header.chunk_bytes
        self._table = page_aligned(self._table_bytes(self.most_chunks_per_extent))
        self._zeros = page_aligned(self._pad)

    @property
    def most_chunks_per_extent(self) -> int:
        """One call carries them all: one buffer for the records, one or two per chunk."""
        return (IOV_MAX - 1) // (2 if self._pad else 1)

    def room(self) -> int:
        """How many chunks one more extent can take."""
        count = min(self._free(0, 0) // self.segment.stride, self.most_chunks_per_extent)
        while count > 0 and self._free(count, self._table_bytes(count)) < 0:
            count -= 1
        return max(count, 0)

    def room_in_all(self) -> int:
        """How many chunks still fit, in however many extents; a guess on the low side."""
        return max(
            0, self._free(0, self._page) // (self.segment.stride + 2 * fmt.RECORD.itemsize)
        )

    def is_unlinked(self) -> bool:
        """Whether somebody removed the file: nobody could read what is written to it now."""
        return self.segment.gone or os.fstat(self._fd).st_nlink == 0

    def append(
        self, keys: Sequence[bytes], payloads: Sequence[memoryview], checksums: Sequence[int]
    ) -> list[int]:
        """Writes one extent; returns the payloads' offsets. At most ``room()`` chunks.

        Raises OSError; the log must then be closed.
        """
        first = self.end + self._table_bytes(len(keys))
        stride = self.segment.stride
        offsets = list(range(first, first + stride * len(keys), stride))
        records = fmt.make_records(keys, offsets, checksums)
        buffers = [self._pack(fmt.EXTENT_MAGIC, records, self.end)]
        for payload in payloads:
            buffers.append(payload)
            if self._pad:
                buffers.append(self._zeros)
        faults.point("segment.before_write")
        self._io.write(self._fd, buffers, self.end)
        faults.point("segment.after_write")
        self.marked_to = self.end
        self.end = first + stride * len(keys)
        self._records.append(records)
        self._count += len(keys)
        return offsets

    @property
    def needs_mark(self) -> bool:
        return self.marked_to < self.end

    def mark(self) -> bool:
        """Makes all of it readable by others. False when only sealing can do that."""
        if self._free(0, self._page) < 0:
            return False
        table = self._pack(fmt.EXTENT_MAGIC, _NO_RECORDS, self.end)
        self._io.write(self._fd, [table], self.end)
        self.end += self._page
        self.marked_to = self.end
        faults.point("segment.after_mark")
        return True

    def seal(self) -> None:
        """Writes footer and trailer and lets go of the file, even where it raises OSError."""
        try:
            faults.point("segment.before_seal")
            header = self.segment.header
            self._io.sync(self._fd)
            length = self._table_bytes(self._count)
            footer_at = self.segment.trailer_offset - length
            if len(self._table) < length:
                self._table = page_aligned(length)
            records = np.concatenate((_NO_RECORDS, *self._records))
            footer = self._pack(fmt.FOOTER_MAGIC, records, footer_at)
            self._io.write(self._fd, [footer], footer_at)
            faults.point("segment.before_trailer")
            trailer = fmt.make_trailer(header, footer_at, length)
            self._table[: self._page] = trailer.pack()
            self._io.write(self._fd, [self._table[: self._page]], trailer.offset)
        finally:
            self.close()
        faults.point("segment.after_seal")

    def close(self) -> None:
        """Lets go of the file as it is: others find it unlocked and adopt it."""
        self.segment.state = State.CLOSED
        locks.close(self._fd)

    def _free(self, chunks: int, table_bytes: int) -> int:
        """Bytes left in front of the footer once so many chunks and a table are added."""
        footer_at = self.segment.trailer_offset - self._table_bytes(self._count + chunks)
        return footer_at - self.end - table_bytes - chunks * self.segment.stride

    def _pack(self, magic: bytes, records: fmt.Records, offset: int) -> memoryview:
        length = fmt.pack_table(
            self._table,
            magic,
            records,
            sequence=self.segment.sequence,
            offset=offset,
            committed=self.end,
            page_bytes=self._page,
        )
        return self._table[:length]

    def _table_bytes(self, records: int) -> int:
        return fmt.table_bytes(records, self._page)
