# SPDX-License-Identifier: Apache-2.0
"""From block and chunk numbers to the bytes that move, vectorised.

A *block* is a page of vLLM's KV cache (a row of a device tensor); a *chunk* is
`blocks_per_chunk` blocks side by side in one row of the host pool. Sub-block `s`
of chunk `c` of a tensor starts at `host + c * host_stride + s * host_page`.

A *fragment* is a run of bytes of one layer's page that is contiguous on both
sides. In the direct layout a page is one fragment; in vLLM's canonical layout
the fragments come from `CanonicalPageMapping.runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Fragment(NamedTuple):
    """Addresses and strides in bytes; `writer` takes turns among `writers`."""

    device: int
    device_stride: int
    host: int
    host_stride: int
    host_page: int
    size: int
    writers: int = 1
    writer: int = 0


@dataclass(frozen=True, slots=True)
class Copies:
    """What to copy: addresses of both sides and sizes in bytes, `total` their sum."""

    device: Int64s
    host: Int64s
    size: Int64s
    total: int


class GroupTable:
    """The fragments of one KV cache group as columns, ready to broadcast."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        table = np.array(fragments, dtype=np.int64).reshape(
            len(fragments), len(Fragment._fields)
        )
        columns = (table[:, i : i + 1] for i in range(table.shape[1]))
        self.device, self.device_stride, self.host, self.host_stride, *rest = columns
        self.host_page, self.size, self.writers, self.writer = rest
        self.takes_turns = bool((self.writers > 1).any())

    def addresses(
        self, blocks: Int64s, chunks: Int64s, subs: Int64s
    ) -> tuple[Int64s, Int64s, Int64s]:
        """Per fragment and block, flat and fragment-major: device, host, size."""
        device = self.device + blocks * self.device_stride
        host = self.host + chunks * self.host_stride + subs * self.host_page
        size = np.broadcast_to(self.size, device.shape)
        return device.ravel(), host.ravel(), size.ravel()

    def written_here(self, pages: Int64s) -> npt.NDArray[np.bool_]:
        """Which (fragment, page) pairs this rank stores; ranks with equal bytes rotate."""
        mine: npt.NDArray[np.bool_] = pages % self.writers == self.writer
        return mine.ravel()


class Span(NamedTuple):
    """The part of a transfer that belongs to one group."""

    group: int
    blocks: Int64s
    chunks: Int64s
    subs: Int64s


def check_range(what: str, numbers: npt.NDArray[np.int32], count: int) -> None:
    """ValueError unless all numbers name one of `count` rows: a copy beyond them would
    overwrite whatever lies there.
    """
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
        wrong = numbers[(numbers < 0) | (numbers >= count)][0]
        raise ValueError(f"{what} {wrong} is not one of 0 to {count - 1}")


def spans(
    blocks: npt.NDArray[np.int32],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    chunks: npt.NDArray[np.int32],
    blocks_per_chunk: int,
) -> list[Span]:
    """Pair every block with its chunk and its place in it, group by group.

    `block_indices[g]` is the request's number of the group's first block: its
    remainder is how many sub-blocks of the first chunk are left alone. Raises
    ValueError when the two sides do not use up each other exactly.
    """
    found = []
    block_at = chunk_at = 0
    for group, (count, first) in enumerate(zip(group_sizes, block_indices, strict=True)):
        if count == 0:
            continue
        skip = first % blocks_per_chunk
        chunk_count = -(-(skip + count) // blocks_per_chunk)
        place = np.arange(skip, skip + count)
        own = chunks[chunk_at : chunk_at + chunk_count].astype(np.int64)
        if len(own) != chunk_count:
            raise ValueError(
                f"group {group}: {count} blocks need {chunk_count} chunks, got {len(own)}"
            )
        found.append(
            Span(
                group,
                blocks[block_at : block_at + count].astype(np.int64),
                own[place // blocks_per_chunk],
                place % blocks_per_chunk,
            )
        )
        block_at += count
        chunk_at += chunk_count
    if block_at != len(blocks) or chunk_at != len(chunks):
        raise ValueError(
            f"transfer uses {block_at} of {len(blocks)} blocks "
            f"and {chunk_at} of {len(chunks)} chunks"
        )
    return found


def plan(
    groups: Sequence[GroupTable], parts: Sequence[Span], blocks_per_chunk: int, store: bool
) -> Copies:
    """The copies of one transfer; neighbours on both sides become one."""
    columns: list[tuple[Int64s, Int64s, Int64s]] = []
    for part in parts:
        table = groups[part.group]
        device, host, size = table.addresses(part.blocks, part.chunks, part.subs)
        if store and table.takes_turns:
            keep = table.written_here(part.chunks * blocks_per_chunk + part.subs)
            device, host, size = device[keep], host[keep], size[keep]
        columns.append((device, host, size))
    if not columns:
        empty = np.empty(0, np.int64)
        return Copies(empty, empty, empty, 0)
    device, host, size = (np.concatenate(c) for c in zip(*columns, strict=True))
    return coalesce(device, host, size)


def coalesce(device: Int64s, host: Int64s, size: Int64s) -> Copies:
    """Merge neighbours in the list that are contiguous on both sides."""
    if len(size) == 0:
        return Copies(device, host, size, 0)
    breaks = (device[1:] != device[:-1] + size[:-1]) | (host[1:] != host[:-1] + size[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    merged = np.add.reduceat(size, starts)
    return Copies(device[starts], host[starts], merged, int(size.sum()))
