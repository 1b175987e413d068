# SPDX-License-Identifier: Apache-2.0
"""Which chunks survive when their segment is evicted: second chance with ghosts.

The store evicts whole segments, oldest first. That alone would be FIFO; what makes it behave
like a per-chunk LRU is that chunks which were hit since they were written (or last moved) are
copied out of the victim first. Chunks that were evicted and soon stored again (their keys are
remembered as ghosts) count as hit from the start.

This is the decision alone: no I/O, no clock, no threads, nothing of the store. One instance
serves one root in one process; the caller holds its own lock around every call but `on_hit`,
which is one store into a bytearray and may run beside the others.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

_HIT_CELLS_PER_CHUNK = 8
_GHOSTS_PER_CHUNK = 2


class SecondChance:
    """Reference marks and ghosts of one root, in tables of fixed size.

    Both tables are indexed by a hash of the key, so a cold chunk costs nothing of its own: the
    whole policy takes 8 one-byte marks and 2 to 4 eight-byte ghosts per chunk of capacity. Two
    keys that share a mark make one of them look hit: a needless copy now and then, never an
    error.

    Args:
        capacity_chunks: how many chunks the root can hold (an estimate will do, >= 1).
        max_copy_share: the most of a victim's chunks that may be moved, 0.0 to 1.0.
        digest: key -> integer, uniform in its low 64 bits. `hash` of bytes is cached in the
            object and differs between processes; tests pass a stable one.
    """

    def __init__(
        self,
        capacity_chunks: int,
        max_copy_share: float = 0.5,
        *,
        digest: Callable[[bytes], int] = hash,
    ) -> None:
        if capacity_chunks < 1:
            raise ValueError(f"capacity_chunks={capacity_chunks}: at least 1")
        if not 0.0 <= max_copy_share <= 1.0:
            raise ValueError(f"max_copy_share={max_copy_share}: between 0 and 1")
        self.max_copy_share = max_copy_share
        self._digest = digest
        self._marks = bytearray(_power_of_two(capacity_chunks * _HIT_CELLS_PER_CHUNK))
        self._mark_mask = len(self._marks) - 1
        self._ghosts = array("Q", bytes(8 * _power_of_two(capacity_chunks * _GHOSTS_PER_CHUNK)))
        self._ghost_mask = len(self._ghosts) - 1

    def on_hit(self, key: bytes) -> None:
        """A look-up or load found the chunk, or a store of it found it already held."""
        self._marks[self._digest(key) & self._mark_mask] = 1

    def on_store(self, key: bytes) -> None:
        """The chunk was written for the first time (not: moved). A returning ghost is hot."""
        digest = self._digest(key)
        self._marks[digest & self._mark_mask] = self._take_ghost(digest)

    def on_removed(self, key: bytes) -> None:
        """The chunk is gone for a reason other than age (corrupt, deleted by others)."""
        self._marks[self._digest(key) & self._mark_mask] = 0

    def choose_copies(self, victim_keys: Sequence[bytes], room_chunks: int) -> list[bytes]:
        """The chunks worth moving out of a segment that is about to go, in the order given.

        Args:
            victim_keys: the victim's chunks that the index still places there, in disk order
                (prefix order within a job).
            room_chunks: how many chunks the open segment can still take.
        """
        most = min(room_chunks, int(self.max_copy_share * len(victim_keys)))
        marks, mask, digest = self._marks, self._mark_mask, self._digest
        hot = [key for key in victim_keys if marks[digest(key) & mask]]
        return hot[: max(most, 0)]

    def on_moved(self, keys: Iterable[bytes]) -> None:
        """The chunks were copied and have used up their second chance."""
        for key in keys:
            self._marks[self._digest(key) & self._mark_mask] = 0

    def on_evicted(self, keys: Iterable[bytes]) -> None:
        """The chunks went with their segment; remember them as ghosts."""
        for key in keys:
            digest = self._digest(key)
            self._marks[digest & self._mark_mask] = 0
            self._ghosts[digest & self._ghost_mask] = digest & 0xFFFFFFFFFFFFFFFF

    def _take_ghost(self, digest: int) -> bool:
        cell = digest & self._ghost_mask
        found = self._ghosts[cell] == digest & 0xFFFFFFFFFFFFFFFF
        if found:
            self._ghosts[cell] = 0
        return found


def _power_of_two(at_least: int) -> int:
    return 1 << max(at_least - 1, 1).bit_length()
