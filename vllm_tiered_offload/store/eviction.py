# SPDX-License-Identifier: Apache-2.0
"""Which chunks survive when their segment is evicted: a second chance, rounded to LRU.

The store evicts whole segments, oldest first. That alone is FIFO. It comes close to a
per-chunk LRU when the right chunks are copied out of a segment before it goes:

- A copy lives one more residency (the time a segment stays: one capacity of writes), so a
  chunk hit early in its residency would stay far longer than LRU keeps it, and one hit late
  far shorter. Copying what was hit in the younger half would be LRU rounded to the nearest
  residency; five eighths, because what was hit has a better future than what was not.
- A chunk hit in two separate periods has a better future than its last hit tells: it is
  copied whenever it was hit. A copy halves the count.

This is the decision alone: no I/O, no clock but the count of chunks written, no threads. One
instance serves one root in one process; the caller holds its own lock around every call.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

# A mark is one byte: | count, 3 bits | period of the last hit, 5 bits |. A residency is 8
# periods, so the number of a period comes back only when its chunks are long gone.
_ONE_HIT, _TWO_HITS, _MOST_HITS, _PERIOD = 0x20, 0x40, 0xE0, 0x1F
_PERIODS_PER_RESIDENCY = 8
_YOUNG_PERIODS = 5

_LARGEST_TABLE = 1 << 22  # chunks; the marks of a larger root share it (34 MB)


class SecondChance:
    """Hit marks of one root, in a table of fixed size.

    Only chunks that were hit have a mark. The table takes at most 8 bytes per chunk of
    capacity, however many keys pass through. What does not fit is forgotten, which costs a hit
    or a needless copy now and then, never an error.

    Args:
        capacity_chunks: how many chunks the root holds when full (an estimate will do, >= 1).
        copies_per_store: how many chunks may be moved for each one stored, >= 0.0. It bounds
            the writes at 1 + that times the stores when everything is hot; what is not used
            is saved up, to a quarter of the capacity.
        digest: key -> integer, uniform in its low 64 bits. `hash` of bytes is kept in the
            object and differs between processes; tests pass a stable one.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        capacity_chunks: int,
        copies_per_store: float = 1.0,
        *,
        digest: Callable[[bytes], int] = hash,
    ) -> None:
        if capacity_chunks < 1:
            raise ValueError(f"capacity_chunks={capacity_chunks}: must be at least 1")
        if copies_per_store < 0.0:
            raise ValueError(f"copies_per_store={copies_per_store}: must be 0 or more")
        self.capacity_chunks = capacity_chunks
        self.copies_per_store = copies_per_store
        self._allowance = 0.0  # chunks that may be moved
        self._digest = digest
        self._marks = _Marks(min(capacity_chunks, _LARGEST_TABLE))
        self._written = 0
        self._period = 0

    def on_hit(self, key: bytes) -> None:
        """A look-up found the chunk, or a store of it found it already held."""
        digest = self._digest(key)
        mark = self._marks.get(digest)
        # Look-ups repeat while a request waits: within a period they are one hit.
        if not mark or mark & _PERIOD != self._period:
            count = min((mark & _MOST_HITS) + _ONE_HIT, _MOST_HITS)
            self._marks.put(digest, count | self._period)

    def on_stored(self, count: int) -> None:
        """So many chunks were written for the first time (not: moved)."""
        self._advance(count)
        saved = self._allowance + count * self.copies_per_store
        self._allowance = min(saved, self.capacity_chunks / 4)

    def choose_copies(self, victim_keys: Sequence[bytes]) -> list[bytes]:
        """The chunks to move out of a segment that is about to go, in the order given.

        Args:
            victim_keys: the victim's chunks that the index still places there, in disk order
                (prefix order within a job: what is cut off at the end is the suffix).
        """
        return self.worth_copying(victim_keys)[: max(int(self._allowance), 0)]

    def worth_copying(self, keys: Sequence[bytes]) -> list[bytes]:
        """As ``choose_copies``, whether or not that many may be moved."""
        return [key for key in keys if self._is_worth_a_copy(key)]

    def on_moved(self, keys: Sequence[bytes]) -> None:
        """The chunks were copied: half their count is used up, the time of the hit stays."""
        self._advance(len(keys))
        self._allowance -= len(keys)
        for key in keys:
            digest = self._digest(key)
            mark = self._marks.get(digest)
            if mark < _TWO_HITS:
                self._marks.discard(digest)
            else:
                self._marks.put(digest, (mark >> 1) & _MOST_HITS | mark & _PERIOD)

    def on_evicted(self, keys: Iterable[bytes]) -> None:
        """The chunks went with their segment, or were lost."""
        for key in keys:
            self._marks.discard(self._digest(key))

    def _is_worth_a_copy(self, key: bytes) -> bool:
        mark = self._marks.get(self._digest(key))
        age = (self._period - mark) & _PERIOD
        return mark >= _TWO_HITS or (mark >= _ONE_HIT and age <= _YOUNG_PERIODS)

    def _advance(self, count: int) -> None:
        self._written += count
        periods = self._written * _PERIODS_PER_RESIDENCY // self.capacity_chunks
        self._period = periods & _PERIOD


class _Marks:
    """digest -> byte, in two 32-bit cells (24 bits of tag, the byte) per chunk of capacity.

    A digest's cell is one of `_PROBES` next to each other; when others have taken them all,
    the first is overwritten.
    """

    _PROBES = 8
    _TAG = 0xFFFFFF00

    def __init__(self, capacity: int) -> None:
        self._homes = 2 * capacity
        # Zeros that take no memory until they are written; a memoryview is quick cell by cell.
        self._cells = np.zeros(self._homes + self._PROBES, np.uint32).data

    def get(self, digest: int) -> int:
        """The byte, 0 if there is none."""
        cell = self._find(digest, self._tag(digest))
        return 0 if cell is None else self._cells[cell] & 0xFF

    def put(self, digest: int, value: int) -> None:
        tag = self._tag(digest)
        cell = self._find(digest, tag)
        if cell is None:
            cell = self._find(digest, 0)
        if cell is None:
            cell = digest % self._homes
        self._cells[cell] = tag | value

    def discard(self, digest: int) -> None:
        cell = self._find(digest, self._tag(digest))
        if cell is not None:
            self._cells[cell] = 0

    def _tag(self, digest: int) -> int:
        return (digest >> 32 & self._TAG) or 0x100  # 0 is the empty cell

    def _find(self, digest: int, tag: int) -> int | None:
        home = digest % self._homes
        for cell in range(home, home + self._PROBES):
            if self._cells[cell] & self._TAG == tag:
                return cell
        return None
