# SPDX-License-Identifier: Apache-2.0
"""Second chances: chunks move out of a segment that is about to go into an open one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm_tiered_offload.store import faults
from vllm_tiered_offload.store.direct_io import IOV_MAX, page_aligned
from vllm_tiered_offload.store.index import RECORD_BITS
from vllm_tiered_offload.store.io_pool import Piece
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.reader import Problem
from vllm_tiered_offload.store.runs import Wanted, cut
from vllm_tiered_offload.store.segment import Segment

COPY_WAIT = 0.02  # seconds between two looks whether a writer needs the slot at once

Fetch = Callable[[Segment, list[Wanted]], tuple[list[Wanted], list[Problem]]]


class Copier:
    """Copies within one root, with the checksums the chunks were stored with.

    Args:
        fetch: reads and verifies, the reader's.
        room: how many chunks fit into the open segments.
        hurry: whether a writer waits for the slot of the victim.
    """

    def __init__(
        self, parts: Parts, fetch: Fetch, room: Callable[[], int], hurry: Callable[[], bool]
    ) -> None:
        self._parts = parts
        self._fetch = fetch
        self._room = room
        self._hurry = hurry
        self._scratch: memoryview | None = None

    def copy_hot(self, victim: Segment) -> bool:
        """Moves the chunks of ``victim`` that the policy picks, as far as there is room.

        False if some of them are left.
        """
        parts = self._parts
        hot = self._hot_records(victim)
        self._copy_all(victim, hot[: self._room()])
        return not parts.index.still_there(victim, hot)

    def _copy_all(self, victim: Segment, wanted: list[int]) -> None:
        parts = self._parts
        with parts.index.lock:
            if victim.gone:
                return
            victim.loads += 1  # keeps other threads of this process from evicting it
        try:
            for batch in _batches(wanted, self._chunks_per_copy()):
                if self._hurry() or not self._copy(victim, batch):
                    return
        finally:
            with parts.index.lock:
                victim.loads -= 1

    def holds_hot(self, victim: Segment) -> bool:
        """Whether it has chunks worth a copy still, allowed or not."""
        records = self._live_records(victim)
        with self._parts.policy_lock:
            keys = [victim.keys[record] for record in records]
            return bool(self._parts.policy.worth_copying(keys))

    def _hot_records(self, victim: Segment) -> list[int]:
        """Those of its chunks that the policy would move."""
        records = self._live_records(victim)
        with self._parts.policy_lock:
            keys = [victim.keys[record] for record in records]
            chosen = set(self._parts.policy.choose_copies(keys))
        return [record for record in records if victim.keys[record] in chosen]

    def _live_records(self, victim: Segment) -> list[int]:
        return self._parts.index.live_records(victim) if victim.ordinal >= 0 else []

    def _chunks_per_copy(self) -> int:
        return max(1, min(self._parts.settings.io_bytes // self._parts.stride, IOV_MAX // 3))

    def _copy(self, victim: Segment, records: list[int]) -> bool:
        """Reads, verifies and hands a batch to a writer. False when it is no use to go on."""
        parts = self._parts
        good = self._read(victim, records)
        if not good:
            return True
        piece = Piece(
            None,
            [chunk.key for chunk in good],
            [chunk.payload for chunk in good],
            [victim.checksums[chunk.record] for chunk in good],
            [victim.ordinal << RECORD_BITS | chunk.record for chunk in good],
        )
        faults.point("reclaimer.before_copy")
        parts.pool.put_copy(piece)
        while not piece.done.wait(COPY_WAIT):
            # The buffer belongs to a writer that has begun; otherwise it must not wait for us,
            # nor we for one that has room.
            useless = self._hurry() or parts.pool.stopping or not self._room()
            if useless and parts.pool.withdraw_copy(piece):
                return False
        faults.point("reclaimer.after_copy")
        return True

    def _read(self, victim: Segment, records: list[int]) -> list[Wanted]:
        """The chunks that have the checksum they were stored with, in the scratch buffer."""
        size, most = victim.header.chunk_bytes, self._parts.settings.io_bytes
        if self._scratch is None:
            self._scratch = page_aligned(self._chunks_per_copy() * size)
        placed = [
            (record, victim.keys[record], self._scratch[n * size : (n + 1) * size])
            for n, record in enumerate(records)
        ]
        good: list[Wanted] = []
        for chunks in cut(victim, placed, most):
            good += self._fetch(victim, chunks)[0]
        return good


def _batches(records: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(records), size):
        yield records[start : start + size]
