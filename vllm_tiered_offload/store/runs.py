# SPDX-License-Identifier: Apache-2.0
"""How a load is cut into calls: neighbours on the disk are read together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tiered_offload.store.direct_io import IOV_MAX
from vllm_tiered_offload.store.index import RECORD_MASK
from vllm_tiered_offload.store.jobs import Job
from vllm_tiered_offload.store.segment import Segment

LARGEST_GAP = 256 << 10  # record pages between neighbours are read along, up to so many bytes
SMALLEST_SHARE = 1 << 20  # a job is not cut into smaller calls for the sake of more threads


@dataclass(slots=True)
class Wanted:
    """One chunk of a load and the row it goes to."""

    key: bytes
    record: int
    offset: int
    payload: memoryview


@dataclass(slots=True)
class Run:
    """Chunks of one segment that one call reads."""

    job: Job
    segment: Segment
    chunks: list[Wanted]


def cut(
    segment: Segment, places: Sequence[tuple[int, bytes, memoryview]], most_bytes: int
) -> list[list[Wanted]]:
    """Cuts chunks of one segment, sorted by place, into calls of up to ``most_bytes``."""
    calls: list[list[Wanted]] = []
    stride, end, start = segment.stride, -1, 0
    chunks: list[Wanted] = []
    for place, key, payload in places:
        record = place & RECORD_MASK
        offset = segment.offsets[record]
        full = offset + stride - start > most_bytes or len(chunks) >= IOV_MAX - 1
        if not chunks or full or not 0 <= offset - end <= LARGEST_GAP:
            chunks = []
            calls.append(chunks)
            start = offset
        chunks.append(Wanted(key, record, offset, payload))
        end = offset + stride
    return calls
