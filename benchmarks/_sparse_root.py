# SPDX-License-Identifier: Apache-2.0
"""A root full of sealed segments that take almost no space: real headers, footers and
trailers around holes. A hole reads as zeros, and the records' checksums are those of zeros,
so every chunk can be loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash

from vllm_tiered_offload.store import Namespace
from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.direct_io import page_aligned
from vllm_tiered_offload.store.geometry import (
    SLACK_BYTES,
    SLOT_OVERHEAD_BYTES,
    Geometry,
    segment_bytes_needed,
    write_geometry,
)

PAGE = fmt.MIN_PAGE_BYTES
CHUNK_BYTES = PAGE
NAMESPACE = Namespace("0" * 32, {"made by": "benchmarks"})


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    """36 bytes each, as vLLM's: a 32-byte hash and a group."""
    return [xxhash.xxh3_128_digest(n.to_bytes(8, "little")) * 2 + bytes(4) for n in numbers]


def make_sparse_root(path: Path, chunks: int, segments: int) -> int:
    """`chunks` spread evenly over `segments`, in order; returns a max_bytes that they fill."""
    per_segment = -(-chunks // segments)
    size = segment_bytes_needed(CHUNK_BYTES, per_segment, PAGE)
    (path / "segments").mkdir(parents=True)
    write_geometry(str(path), Geometry(PAGE, size, None))
    for slot in range(segments):
        numbers = range(slot * per_segment, min(chunks, (slot + 1) * per_segment))
        _write_segment(path / "segments" / f"{slot:06d}.seg", slot, size, keys_of(numbers))
    return (segments + 2) * (size + SLOT_OVERHEAD_BYTES) + SLACK_BYTES + (1 << 20)


def _write_segment(path: Path, slot: int, size: int, keys: list[bytes]) -> None:
    header = fmt.PageBlock(
        fmt.SEGMENT_MAGIC, PAGE, size, slot + 1, 0, CHUNK_BYTES, slot, False, 0, 0,
        NAMESPACE.fingerprint,
    )  # fmt: skip
    first = PAGE + fmt.table_bytes(len(keys), PAGE)
    offsets = np.arange(len(keys)) * CHUNK_BYTES + first
    zeros = bytes(CHUNK_BYTES)
    checksums = [
        fmt.digest(zeros, fmt.payload_seed(NAMESPACE.fingerprint, key)) for key in keys
    ]
    length = fmt.table_bytes(len(keys), PAGE)
    footer_at = size - PAGE - length
    footer = page_aligned(length)
    fmt.pack_table(
        footer,
        fmt.FOOTER_MAGIC,
        fmt.make_records(keys, offsets.tolist(), checksums),
        sequence=header.sequence,
        offset=footer_at,
        committed=footer_at,
        page_bytes=PAGE,
    )
    with open(path, "wb") as file:
        os.truncate(file.fileno(), size)
        os.pwrite(file.fileno(), header.pack(), 0)
        os.pwrite(file.fileno(), footer, footer_at)
        trailer = fmt.make_trailer(header, footer_at, length)
        os.pwrite(file.fileno(), trailer.pack(), trailer.offset)
