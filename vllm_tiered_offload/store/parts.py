# SPDX-License-Identifier: Apache-2.0
"""What the threads of one root share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.api import Namespace, StoreSettings
from vllm_tiered_offload.store.counters import Counters
from vllm_tiered_offload.store.descriptors import Descriptors
from vllm_tiered_offload.store.direct_io import BlockIO
from vllm_tiered_offload.store.eviction import SecondChance
from vllm_tiered_offload.store.geometry import writers_that_fit
from vllm_tiered_offload.store.index import Index
from vllm_tiered_offload.store.io_pool import IoPool
from vllm_tiered_offload.store.jobs import JobTable
from vllm_tiered_offload.store.root import Root
from vllm_tiered_offload.store.segment import Segment, State
from vllm_tiered_offload.store.slots import Slots
from vllm_tiered_offload.store.syscalls import Syscalls
from vllm_tiered_offload.store.watch import Pause, Watch


class Catalogue:
    """Every segment of the root this process has met, of all namespaces, by path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[str, Segment] = {}
        self.leftovers: set[str] = set()  # files in slots that hold nothing readable
        self.strangers: set[str] = set()  # files in slots that are not ours to remove

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._segments) + len(self.leftovers) + len(self.strangers)

    def get(self, path: str) -> Segment | None:
        return self._segments.get(path)

    def put(self, segment: Segment) -> Segment | None:
        """Adds it; returns the one that was in its slot before, as far as anyone noticed."""
        with self._lock:
            before = self._segments.get(segment.path)
            self._segments[segment.path] = segment
            self.leftovers.discard(segment.path)
            self.strangers.discard(segment.path)
            return before

    def find(self, segment: Segment) -> bool:
        """Adds what a listing showed; False if its slot has an entry by now."""
        with self._lock:
            if segment.path in self._segments:
                return False
            self._segments[segment.path] = segment
            self.leftovers.discard(segment.path)
            self.strangers.discard(segment.path)
            return True

    def find_odd(self, path: str, *, leftover: bool) -> None:
        """As ``find``, of a file that is no segment."""
        with self._lock:
            if path not in self._segments:
                (self.leftovers if leftover else self.strangers).add(path)

    def clear(self) -> None:
        with self._lock:
            self._segments.clear()
            self.leftovers.clear()
            self.strangers.clear()

    def remove(self, segment: Segment) -> None:
        with self._lock:
            if self._segments.get(segment.path) is segment:
                del self._segments[segment.path]

    def all(self) -> list[Segment]:
        with self._lock:
            return list(self._segments.values())

    def closed(self) -> list[Segment]:
        """Candidates for eviction, the oldest first."""
        closed = [segment for segment in self.all() if segment.state is State.CLOSED]
        return sorted(closed, key=lambda segment: segment.sequence)


@dataclass(slots=True)
class Parts:
    """One root in one process."""

    number: int  # of the root among the store's
    settings: StoreSettings
    namespace: Namespace
    chunk_bytes: int
    threads: int  # that write, each to a segment of its own
    root: Root
    syscalls: Syscalls
    io: BlockIO
    slots: Slots
    index: Index
    jobs: JobTable
    pool: IoPool
    descriptors: Descriptors
    policy: SecondChance
    watch: Watch
    pause: Pause
    forget_storing: Callable[[Sequence[bytes]], None]
    drain_hits: Callable[[], None]
    counters: Counters = field(default_factory=Counters)
    catalogue: Catalogue = field(default_factory=Catalogue)
    clock: Callable[[], float] = time.monotonic
    policy_lock: threading.Lock = field(default_factory=threading.Lock)
    others_store_until: float = float("-inf")  # another process fills segments, too

    @property
    def stride(self) -> int:
        """Bytes a payload takes in a file."""
        return fmt.round_up(self.chunk_bytes, self.root.geometry.page_bytes)

    @property
    def writers(self) -> int:
        """How many of the threads write at present: another process may have made the bound
        too small for the others."""
        return min(self.threads, writers_that_fit(self.root.slots))

    def made(self, segment: Segment) -> None:
        """A writer has a new segment; what its slot held before is not there any more."""
        before = self.catalogue.put(segment)
        self.slots.in_the_making.discard(segment.sequence)
        if before is not None:
            self.lose(before)

    def found(self, segment: Segment) -> bool:
        """A file is there that was not known. False if it is here only because a writer of
        this process has not entered it yet, or because it is being evicted."""
        slots, sequence = self.slots, segment.sequence
        if sequence in slots.in_the_making or sequence in slots.removed:
            return False
        return self.catalogue.find(segment)

    def lose(self, segment: Segment) -> None:
        """Somebody else removed or replaced it."""
        if not segment.gone:
            chunks = self.forget(segment)
            self.counters.add(lost_segments=1, lost_chunks=chunks)

    def forget(self, segment: Segment) -> int:
        """A segment is gone: returns how many chunks went with it."""
        removed = self.index.drop(segment)
        self.catalogue.remove(segment)
        self.descriptors.forget(segment)
        with self.policy_lock:
            self.policy.on_evicted(removed)
        return len(removed)
