# SPDX-License-Identifier: Apache-2.0
"""Taking care of a root from outside: verify, prune, clear. Safe beside running stores.

Removing is what an evictor of another process does: under the root lock, and only files
without a live writer. Stores that had chunks there miss them, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store import locks, namespaces
from vllm_tiered_offload.store.api import StoreError
from vllm_tiered_offload.store.inspection import (
    NamespaceFacts,
    RootFacts,
    SegmentFacts,
    inspection_io,
    read_records,
)
from vllm_tiered_offload.store.recovery import Kind, SegmentReader
from vllm_tiered_offload.store.root import Root
from vllm_tiered_offload.store.slots import Removal, Slots
from vllm_tiered_offload.store.syscalls import Syscalls, explain

_BATCH = 32  # chunks between two looks at the clock
_KEEP = 7 * 86400.0  # seconds
_NOT = {Kind.DAMAGED: "no valid header", Kind.STRANGE: "not a regular file"}


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a segment; ``keys`` are those of its bad chunks."""

    segment: SegmentFacts
    keys: tuple[bytes, ...]
    problem: str


@dataclass(frozen=True, slots=True)
class Removed:
    """The outcome of an attempt to remove segments."""

    segments: tuple[SegmentFacts, ...]
    busy: tuple[SegmentFacts, ...]  # a live process writes them, or removed them first
    refused: tuple[SegmentFacts, ...]  # the file system would not let go of them

    @property
    def allocated_bytes(self) -> int:
        return sum(segment.allocated_bytes for segment in self.segments)


class Pace:
    """Keeps a reader below ``bytes_per_second``; 0 means as fast as it goes."""

    def __init__(
        self,
        bytes_per_second: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._start = clock()
        self._moved = 0

    def moved(self, size: int) -> None:
        """Call after ``size`` bytes; sleeps if they came too fast."""
        self._moved += size
        if self._rate:
            ahead = self._moved / self._rate - (self._clock() - self._start)
            if ahead > 0:
                self._sleep(ahead)


class Verifier:
    """Reads every readable chunk and compares its checksum.

    ``on_chunks`` is told (chunks, bytes) as they are read.
    """

    def __init__(
        self,
        root: Root,
        pace: Pace,
        on_chunks: Callable[[int, int], None] = lambda chunks, size: None,
        syscalls: Syscalls | None = None,
    ) -> None:
        self._io = inspection_io(root.geometry, syscalls or Syscalls())
        self._reader = SegmentReader(self._io)
        self._pace = pace
        self._on_chunks = on_chunks

    def verify(self, segments: Iterable[SegmentFacts]) -> Iterator[Damage]:
        """What is damaged. Segments that go meanwhile are passed over: an eviction is no
        damage. So are files of a newer version, and empty ones."""
        for segment in segments:
            if segment.kind in (Kind.EMPTY, Kind.NEWER):
                continue
            try:
                found = self._verify_segment(segment)
            except FileNotFoundError:
                continue
            except OSError as error:
                found = Damage(segment, (), explain(error))
            if found is not None:
                yield found

    def _verify_segment(self, segment: SegmentFacts) -> Damage | None:
        fd = self._io.open(segment.path, os.O_RDONLY)
        try:
            kind, header = self._reader.identify(fd)
            if header is None:
                return Damage(segment, (), _NOT[kind]) if kind is segment.kind else None
            if header.sequence != segment.sequence:
                return None  # the slot was taken anew
            readable = read_records(self._reader, fd, header)
            bad = self._bad_keys(fd, header, readable.records)
            info = os.fstat(fd)
            if info.st_nlink == 0 or info.st_size < header.segment_bytes:
                return None  # wrong bytes in a file that somebody is deleting are no damage
        finally:
            os.close(fd)
        if bad:
            total = len(readable.records)
            return Damage(segment, bad, f"{len(bad)} of {total} chunks are damaged")
        return Damage(segment, (), readable.problem) if readable.problem else None

    def _bad_keys(
        self, fd: int, header: fmt.PageBlock, records: fmt.Records
    ) -> tuple[bytes, ...]:
        bad: list[bytes] = []
        for start in range(0, len(records), _BATCH):
            part = records[start : start + _BATCH]
            verdicts = self._reader.payloads_match(fd, header, part)
            keys = fmt.record_keys(part)
            bad += [key for key, right in zip(keys, verdicts, strict=True) if not right]
            self._on_chunks(len(part), len(part) * header.chunk_bytes)
            self._pace.moved(len(part) * header.chunk_bytes)
        return tuple(bad)


def removal_order(facts: RootFacts) -> list[SegmentFacts]:
    """Segments as an evictor would take them: what can never hit again, then the oldest."""
    orphaned = {space.fingerprint for space in facts.namespaces if space.orphaned}

    def rank(segment: SegmentFacts) -> tuple[bool, bool, int]:
        header = segment.header
        return (
            header is not None,
            header is not None and header.fingerprint not in orphaned,
            segment.sequence,
        )

    closed = (segment for segment in facts.segments if segment.state != "writing")
    return sorted(closed, key=rank)


def over_bytes(facts: RootFacts, max_bytes: int) -> list[SegmentFacts]:
    """What has to go until the segments take at most ``max_bytes``."""
    excess = facts.allocated_bytes - max_bytes
    chosen: list[SegmentFacts] = []
    for segment in removal_order(facts):
        if excess <= 0:
            break
        chosen.append(segment)
        excess -= segment.allocated_bytes
    return chosen


def older_than(facts: RootFacts, seconds: float, now: float) -> list[SegmentFacts]:
    """Segments last written longer ago than ``seconds``; ``now`` is seconds since 1970."""
    return [s for s in removal_order(facts) if now - s.written_at > seconds]


def of_namespaces(facts: RootFacts, spaces: Iterable[NamespaceFacts]) -> list[SegmentFacts]:
    """Segments of these namespaces."""
    wanted = {space.fingerprint for space in spaces}
    return [s for s in removal_order(facts) if s.header and s.header.fingerprint in wanted]


def orphans(facts: RootFacts) -> list[SegmentFacts]:
    """What no process can ever use: dead private namespaces, files without a segment, and
    slots over the bound."""
    dead = of_namespaces(facts, (space for space in facts.namespaces if space.orphaned))
    limit = facts.root.slots
    over = [s for s in removal_order(facts) if s.header and s.slot >= limit]
    return list({s.path: s for s in (*facts.strays, *dead, *over)}.values())


def check_locks(root: Root, syscalls: Syscalls | None = None) -> None:
    """Raises StoreError where locks do not exclude: nothing may be removed there."""
    problem = locks.probe(root.path, syscalls or Syscalls())
    if problem is not None:
        raise StoreError(f"{root.path}: {problem}; stop all users of the root and delete files")


def remove_segments(
    root: Root, segments: Iterable[SegmentFacts], syscalls: Syscalls | None = None
) -> Removed:
    """Removes files whose writer is gone. Raises StoreError where locks do not work."""
    syscalls = syscalls or Syscalls()
    check_locks(root, syscalls)
    slots = Slots(root, syscalls, inspection_io(root.geometry, syscalls))
    outcome: dict[Removal, list[SegmentFacts]] = {removal: [] for removal in Removal}
    for segment in segments:
        with root.lock.hold():
            claim = slots.claim(segment.path, segment.sequence)
        if not isinstance(claim, Removal):
            claim = slots.finish(segment.path, claim)
        outcome[claim].append(segment)
    return Removed(
        tuple(outcome[Removal.DONE]),
        (*outcome[Removal.BUSY], *outcome[Removal.CHANGED]),
        tuple(outcome[Removal.REFUSED]),
    )


def forgettable(facts: RootFacts, now: float) -> list[str]:
    """Fingerprints without a segment whose manifest may go.

    A shared namespace may be a running engine's that has stored nothing yet; its manifest
    is kept for a while, as nothing tells of such an engine.
    """
    return [
        space.fingerprint
        for space in facts.namespaces
        if not space.segments
        and (space.orphaned or (not space.private and now - space.described_at > _KEEP))
    ]


def remove_manifests(root: Root, fingerprints: Iterable[str]) -> int:
    """Deletes manifests; returns how many.

    A private namespace whose process lives keeps its own, which is its lock.
    """
    removed = 0
    for fingerprint in fingerprints:
        with root.lock.hold():
            if not namespaces.is_alive(root, fingerprint):
                with contextlib.suppress(OSError):
                    os.unlink(namespaces.manifest_path(root, fingerprint))
                    removed += 1
    return removed
