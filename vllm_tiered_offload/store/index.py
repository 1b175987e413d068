# SPDX-License-Identifier: Apache-2.0
"""From key to place: one integer per chunk.

A place is ``ordinal << 24 | record``: the segment, numbered as this process met
it, and the chunk within. A dictionary of plain integers takes about half the
memory of one of tuples.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_tiered_offload.store.segment import Segment

RECORD_BITS = 24
RECORD_MASK = (1 << RECORD_BITS) - 1
Column = Sequence[int] | npt.NDArray[np.uint64]
_BATCH = 1024  # records per hold of the lock, so that nobody waits for a whole segment


class Index:
    """The chunks this process can read. Look-ups of ``places`` need no lock."""

    def __init__(self, *, events: bool = False) -> None:
        self.lock = threading.Lock()
        self.places: dict[bytes, int] = {}
        self.segments: dict[int, Segment] = {}
        self._next_ordinal = 0
        self._events: list[tuple[bool, list[bytes]]] | None = [] if events else None

    def __len__(self) -> int:
        return len(self.places)

    def register(self, segment: Segment) -> None:
        """Gives the segment its ordinal."""
        with self.lock:
            segment.ordinal = self._next_ordinal
            self._next_ordinal += 1
            self.segments[segment.ordinal] = segment

    def add(
        self,
        segment: Segment,
        keys: Sequence[bytes],
        offsets: Column,
        checksums: Column,
        *,
        announce: bool = True,
    ) -> None:
        """Appends chunks to the segment and makes it their place.

        This, ``offer`` and ``move`` do nothing for a segment that is gone: a key placed in it
        would be found for ever and never be loaded.
        """
        with self.lock:
            if segment.gone:
                return
            first = self._append(segment, keys, offsets, checksums)
            self.places.update(zip(keys, range(first, first + len(keys)), strict=True))
            if announce:
                self._tell(False, keys)

    def offer(
        self,
        segment: Segment,
        keys: Sequence[bytes],
        offsets: Column,
        checksums: Column,
    ) -> None:
        """As ``add``, but a chunk that a younger segment holds stays where it is.

        The older copy is the first to be evicted.
        """
        with self.lock:
            if segment.gone:
                return
            first = self._append(segment, keys, offsets, checksums)
        for start in range(0, len(keys), _BATCH):
            batch = slice(start, start + _BATCH)
            with self.lock:
                if segment.gone:
                    return
                self._tell(False, self._offer(segment, first + start, keys[batch]))

    def _offer(self, segment: Segment, first: int, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the keys that had no place."""
        places = self.places
        if places.keys().isdisjoint(keys):  # nearly always, and quick
            places.update(zip(keys, range(first, first + len(keys)), strict=True))
            return keys
        fresh: list[bytes] = []
        for place, key in enumerate(keys, first):
            old = places.get(key)
            if old is not None and self._younger(old, segment):
                continue
            places[key] = place
            if old is None:
                fresh.append(key)
        return fresh

    def move(
        self,
        segment: Segment,
        keys: Sequence[bytes],
        offsets: Column,
        checksums: Column,
        old_places: Iterable[int],
    ) -> None:
        """Appends copies of chunks; those that are still at their old place move here."""
        with self.lock:
            if segment.gone:
                return
            place = self._append(segment, keys, offsets, checksums)
            for key, old in zip(keys, old_places, strict=True):
                if self.places.get(key) == old:
                    self.places[key] = place
                place += 1

    def discard(self, segment: Segment, record: int) -> bool:
        """A chunk turned out unreadable: it is forgotten, for no record is indexed twice."""
        with self.lock:
            return self._remove(segment.keys[record], segment.ordinal << RECORD_BITS | record)

    def drop(self, segment: Segment) -> list[bytes]:
        """Forgets a segment; returns the keys that were readable from it and no longer are."""
        removed: list[bytes] = []
        with self.lock:
            segment.gone = True  # before its keys are counted: none is added any more
        for start in range(0, len(segment.keys), _BATCH):
            with self.lock:
                place = segment.ordinal << RECORD_BITS | start
                batch = segment.keys[start : start + _BATCH]
                removed += [k for i, k in enumerate(batch) if self._remove(k, place + i)]
        with self.lock:
            self.segments.pop(segment.ordinal, None)
        return removed

    def live_records(self, segment: Segment) -> list[int]:
        """The records that are still the place of their key, in the order of the file."""
        base = segment.ordinal << RECORD_BITS
        get = self.places.get
        return [i for i, key in enumerate(segment.keys) if get(key) == base | i]

    def still_there(self, segment: Segment, records: Iterable[int]) -> bool:
        """Whether any of these records is the place of its key."""
        base = segment.ordinal << RECORD_BITS
        return any(self.places.get(segment.keys[i]) == base | i for i in records)

    def clear(self) -> None:
        """Forgets everything; ordinals go on, so that old places mean nothing."""
        with self.lock:
            self.places.clear()
            self.segments.clear()

    def take_events(self) -> list[tuple[bool, list[bytes]]]:
        """(removed, keys) in the order things happened."""
        if self._events is None:
            return []
        with self.lock:
            events, self._events = self._events, []
        return events

    def _append(
        self,
        segment: Segment,
        keys: Sequence[bytes],
        offsets: Column,
        checksums: Column,
    ) -> int:
        first = segment.ordinal << RECORD_BITS | len(segment.keys)
        segment.keys.extend(keys)
        # Through numpy: records come as its columns, a million at a restart.
        segment.offsets.frombytes(np.asarray(offsets, np.uint64).tobytes())
        segment.checksums.frombytes(np.asarray(checksums, np.uint64).tobytes())
        return first

    def _remove(self, key: bytes, place: int) -> bool:
        if self.places.get(key) != place:
            return False
        del self.places[key]
        self._tell(True, (key,))
        return True

    def _younger(self, place: int, than: Segment) -> bool:
        holder = self.segments.get(place >> RECORD_BITS)
        return holder is not None and holder.sequence > than.sequence

    def _tell(self, removed: bool, keys: Sequence[bytes]) -> None:
        if self._events is None or not keys:
            return
        if self._events and self._events[-1][0] is removed:
            self._events[-1][1].extend(keys)
        else:
            self._events.append((removed, list(keys)))
