# SPDX-License-Identifier: Apache-2.0
"""Where everything lies in the region: pure arithmetic in bytes.

    row r:  | slot of worker 0 | slot of worker 1 | ... | padding |

A row is one chunk of all workers. Rows are whole pages; slots need not be.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_tiered_offload.region.settings import RegionError

Range = tuple[int, int]  # offset, length


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of one region.

    Args:
        num_chunks: rows.
        row_bytes: distance between rows, a multiple of `page`.
        slot_bytes: bytes of one worker in a row, without padding.
        page: page size in bytes.
    """

    num_chunks: int
    row_bytes: int
    slot_bytes: int
    page: int = mmap.PAGESIZE

    def __post_init__(self) -> None:
        if self.num_chunks < 1 or self.row_bytes < 1:
            raise RegionError(
                f"an empty region was asked for: {self.num_chunks} chunks of "
                f"{self.row_bytes} bytes; raise cpu_bytes_to_use"
            )
        if self.row_bytes % self.page:
            raise RegionError(
                f"a chunk of {self.row_bytes} bytes is not a multiple of the page size "
                f"{self.page}; raise block_size_alignment to {self.page} or a multiple"
            )
        if not 0 < self.slot_bytes <= self.row_bytes:
            raise RegionError(
                f"a worker's {self.slot_bytes} bytes do not fit a chunk of {self.row_bytes}"
            )

    @property
    def total_bytes(self) -> int:
        return self.num_chunks * self.row_bytes

    @property
    def num_slots(self) -> int:
        return self.row_bytes // self.slot_bytes

    def slot_offset(self, slot: int) -> int:
        """Offset of a worker's slot in a row; raises `RegionError` past the row's end."""
        if not 0 <= slot < self.num_slots:
            raise RegionError(
                f"slot {slot} is outside a chunk of {self.num_slots} slots "
                f"({self.row_bytes} bytes, {self.slot_bytes} a worker)"
            )
        return slot * self.slot_bytes

    def slot_ranges(self, slot: int) -> Iterator[Range]:
        """The worker's slot in each row, rounded out to pages."""
        start_in_row = self.slot_offset(slot)
        first = start_in_row - start_in_row % self.page
        length = round_up(start_in_row + self.slot_bytes, self.page) - first
        for start in range(first, self.total_bytes, self.row_bytes):
            yield start, length

    def share(self, index: int, count: int, granule: int | None = None) -> Range:
        """The `index`-th of `count` equal contiguous shares, cut at multiples of `granule`."""
        if not 0 <= index < count:
            raise RegionError(f"share {index} of {count} does not exist")
        granule = granule or self.page
        size = round_up(-(-self.total_bytes // count), granule)
        start = min(index * size, self.total_bytes)
        return start, min(size, self.total_bytes - start)
