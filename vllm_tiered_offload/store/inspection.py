# SPDX-License-Identifier: Apache-2.0
"""What lies in a root, for people and tools. Reads only; safe beside running stores.

A store in use changes while it is looked at: every fact here was true of its file for a
moment, and none of them is a promise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store import locks, namespaces
from vllm_tiered_offload.store.api import StoreError
from vllm_tiered_offload.store.direct_io import BlockIO
from vllm_tiered_offload.store.geometry import Geometry, read_geometry
from vllm_tiered_offload.store.locks import RootLock
from vllm_tiered_offload.store.recovery import Kind, SegmentReader
from vllm_tiered_offload.store.root import Root, slot_number
from vllm_tiered_offload.store.small_files import read_json
from vllm_tiered_offload.store.syscalls import Syscalls

# sealed: complete. writing: a live process fills it. unsealed: its writer is gone. none:
# the file holds no segment.
State = Literal["sealed", "writing", "unsealed", "none"]


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One file in a slot. ``header`` is None unless ``kind`` is SEGMENT."""

    path: str
    slot: int
    kind: Kind
    state: State
    header: fmt.PageBlock | None
    allocated_bytes: int
    written_at: float  # seconds since 1970: last change of the file
    chunks: int  # readable by every process; 0 where they were not counted

    @property
    def sequence(self) -> int:
        """What ``Slots.claim`` wants to be told: 0 for a file without a header."""
        return self.header.sequence if self.header else 0


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """The segments under one fingerprint; ``manifest`` is empty where its file is missing.

    ``alive`` is None for a namespace that outlives its process; ``described_at`` is when its
    manifest was written, in seconds since 1970.
    """

    fingerprint: str
    private: bool
    alive: bool | None
    manifest: Mapping[str, Any]
    segments: tuple[SegmentFacts, ...]
    described_at: float = 0.0

    @property
    def orphaned(self) -> bool:
        """Whether nothing of it can ever be found again."""
        return self.private and not self.alive

    @property
    def allocated_bytes(self) -> int:
        return sum(segment.allocated_bytes for segment in self.segments)

    @property
    def chunks(self) -> int:
        return sum(segment.chunks for segment in self.segments)

    @property
    def written_at(self) -> float:
        return max((segment.written_at for segment in self.segments), default=0.0)


@dataclass(frozen=True, slots=True)
class RootFacts:
    """A root as it was when looked at. ``strays``: files in slots that hold no segment."""

    root: Root
    segments: tuple[SegmentFacts, ...]
    namespaces: tuple[NamespaceFacts, ...]
    free_bytes: int

    @property
    def strays(self) -> tuple[SegmentFacts, ...]:
        return tuple(segment for segment in self.segments if segment.header is None)

    @property
    def allocated_bytes(self) -> int:
        return sum(segment.allocated_bytes for segment in self.segments)


def open_for_inspection(path: Path, syscalls: Syscalls | None = None) -> Root:
    """A root that is there. Raises StoreError, in one line, where there is none."""
    if not path.is_dir():
        raise StoreError(f"{path} is not a directory")
    geometry = read_geometry(str(path))
    if geometry is None:
        raise StoreError(f"{path} holds no store: there is no root.json in it")
    syscalls = syscalls or Syscalls()
    lock = RootLock(f"{path}/root.lock", syscalls)
    root = Root(path, geometry, 0, lock, syscalls.total_bytes(str(path)))
    root.measure_foreign()
    return root


def look_at(path: Path, *, syscalls: Syscalls | None = None) -> RootFacts:
    """All facts about a root; reads the records of every segment, some hundred KiB each.

    Raises StoreError, or OSError where something cannot be read.
    """
    syscalls = syscalls or Syscalls()
    root = open_for_inspection(path, syscalls)
    segments = tuple(_segments(root, inspection_io(root.geometry, syscalls)))
    return RootFacts(
        root,
        segments,
        tuple(_namespaces(root, segments)),
        syscalls.free_bytes(root.path),
    )


def inspection_io(geometry: Geometry, syscalls: Syscalls) -> BlockIO:
    """Direct where that works, so that looking does not push others out of the page cache."""
    return BlockIO(syscalls, geometry.page_bytes, direct=True)


@dataclass(frozen=True, slots=True)
class Readable:
    """The records that every process may use. ``problem``: why a footer does not count."""

    records: fmt.Records
    sealed: bool
    problem: str = ""


def read_records(reader: SegmentReader, fd: int, header: fmt.PageBlock) -> Readable:
    """The records of a segment: the footer's, else those below its last mark."""
    problem = ""
    try:
        footer = reader.footer(fd, header)
        if footer is not None:
            return Readable(footer, sealed=True)
    except fmt.FormatError as error:
        problem = f"footer: {error}"
    scan = reader.scan(fd, header, header.page_bytes)
    good = [extent.records for extent in scan.extents if extent.end <= scan.committed]
    records = np.concatenate((fmt.make_records([], [], []), *good))
    return Readable(records, sealed=False, problem=problem)


def _segments(root: Root, io: BlockIO) -> Iterator[SegmentFacts]:
    reader = SegmentReader(io)
    with os.scandir(root.segments_dir) as entries:
        found = sorted(
            (number, entry.path)
            for entry in entries
            if (number := slot_number(entry.name)) is not None
        )
    for slot, path in found:
        facts = _look_at_segment(slot, path, reader, io)
        if facts is not None:
            yield facts


def _look_at_segment(
    slot: int, path: str, reader: SegmentReader, io: BlockIO
) -> SegmentFacts | None:
    """None for a file that went while being looked at."""
    try:
        fd = io.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError:  # a symbolic link, or no permission: a slot in use all the same
        written_at = os.lstat(path).st_mtime
        return SegmentFacts(path, slot, Kind.STRANGE, "none", None, 0, written_at, 0)
    try:
        info = os.fstat(fd)
        kind, header = reader.identify(fd)
        state: State = "none"
        chunks = 0
        if header is not None:
            readable = read_records(reader, fd, header)
            state = "sealed" if readable.sealed else _writer_state(fd)
            chunks = len(readable.records)
    finally:
        os.close(fd)
    return SegmentFacts(
        path, slot, kind, state, header, info.st_blocks * 512, info.st_mtime, chunks
    )


def _writer_state(fd: int) -> State:
    """An open segment's writer holds its lock for life."""
    try:
        if not locks.try_lock(fd, shared=True):
            return "writing"
        locks.unlock(fd)
    except OSError:
        return "writing"  # nobody can tell; the careful answer
    return "unsealed"


def _namespaces(root: Root, segments: tuple[SegmentFacts, ...]) -> Iterator[NamespaceFacts]:
    by_fingerprint: dict[str, list[SegmentFacts]] = {}
    for segment in segments:
        if segment.header is not None:
            by_fingerprint.setdefault(segment.header.fingerprint, []).append(segment)
    for fingerprint in _manifests(root):
        by_fingerprint.setdefault(fingerprint, [])
    for fingerprint, own in sorted(by_fingerprint.items()):
        document, described_at = _manifest(namespaces.manifest_path(root, fingerprint))
        private = any(segment.header.private for segment in own if segment.header)
        private = private or document.get("private") is True
        manifest = document.get("manifest")
        yield NamespaceFacts(
            fingerprint,
            private,
            namespaces.is_alive(root, fingerprint) if private else None,
            manifest if isinstance(manifest, dict) else {},
            tuple(own),
            described_at,
        )


def _manifests(root: Root) -> Iterator[str]:
    for name in sorted(os.listdir(root.namespaces_dir)):
        stem, dot, suffix = name.partition(".")
        if dot and suffix == "json":
            yield stem


def _manifest(path: str) -> tuple[dict[str, Any], float]:
    """The document and when it was written; empty where there is none to be read."""
    try:
        written_at = os.lstat(path).st_mtime
        return read_json(path), written_at
    except (OSError, ValueError):
        return {}, 0.0
