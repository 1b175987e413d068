# SPDX-License-Identifier: Apache-2.0
"""How much of the CPU pool a request may take for promotions, and when it waits.

Pure, like `pins.py`. The rules:

* All pins and promotions together stay below a share of the pool, and leave
  head-room for stores.
* A request that holds pins never waits for more (no hold and wait): the group
  of keys that found no room is told to stop, and the request starts with what
  it has. Without pins it may wait, for a bounded time, as long as others hold
  most of what it could get.
* With several KV groups a full-attention prefix is of use only up to where the
  tiers have the sliding windows that end there; vLLM stores those at the ends of
  prompts only. A prefix that must be cut leaves room for its windows, and none
  is read beyond the cut.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from vllm_tiered_offload.pins import Admission, PinBook
from vllm_tiered_offload.waits import IN_TIME, OUT_OF_PATIENCE

PositionOf = Callable[[bytes], "int | None"]

_ENOUGH = 0.75  # of what waiting could give: then take it now
_CUT = 0.75  # what a prefix keeps of its room when it must leave some to windows


class Verdict(enum.Enum):
    """Answer to one request for one chunk of room."""

    TAKE = enum.auto()  # queued: promoted at the end of the step
    WAIT = enum.auto()  # ask again in a later step
    FULL = enum.auto()  # no room: this group of the request gets no more
    REFUSE = enum.auto()  # settled before


class Room:
    """Decides over a pool of `num_chunks` chunks; `book` keeps who has what.

    vLLM searches a full-attention group from left to right and stops at the
    first miss, a sliding window from right to left and does not, and repeats
    the search within a step until all groups agree. So within a step the same
    key always gets the same answer, and a request that waits answers WAIT for
    one key of every group: a group without it would be a definite zero, and one
    zero makes the whole request's hit zero.
    """

    def __init__(self, num_chunks: int, book: PinBook, groups: int = 1) -> None:
        settings = book.settings
        self.cap = max(1, int(num_chunks * settings.max_share)) if num_chunks else 0
        self.headroom = int(num_chunks * settings.store_headroom)
        self.most = min(self.cap, num_chunks - self.headroom)
        self._groups = groups
        self._book = book

    def ask(
        self,
        admission: Admission,
        key: bytes,
        tier: int,
        free: int,
        position_of: PositionOf | None = None,
    ) -> Verdict:
        """May this request promote `key` from tier number `tier`?

        Args:
            free: rows of the pool that are free or evictable now.
            position_of: a key's last token position, where vLLM records it.
        """
        if admission.step != self._book.step:
            admission.begin(self._book.step)
        settled = self._settled(admission, key, position_of)
        if settled is not None:
            return settled
        room = self._left(admission, free)
        if admission.waiting and not self._try_again(admission, room):
            return self._blocked(admission, key)
        if room > 0:
            self._book.enqueue(admission, key, tier)
            return Verdict.TAKE
        if self._may_wait(admission):
            self._start_waiting(admission, room, key)
            # Not REFUSE, even if keys of the group were queued: a search from
            # right to left forgets at a miss what it had waited for.
            return Verdict.WAIT
        if self._groups > 1 and self._cut_the_first(admission, key[-4:], position_of):
            return self.ask(admission, key, tier, free, position_of)
        # With patience left it has enough by now of what others read.
        patient = self._has_patience(admission)
        self._book.waits.end(admission, IN_TIME if patient else OUT_OF_PATIENCE)
        admission.full.add(key[-4:])
        if self._groups > 1:
            self._cut(admission, key[-4:], key, position_of)
        return Verdict.FULL

    def _settled(
        self, admission: Admission, key: bytes, position_of: PositionOf | None
    ) -> Verdict | None:
        if key in admission.tried or key[-4:] in admission.full:
            return Verdict.REFUSE
        if admission.limit is None:
            return None
        return self._beyond_the_cut(admission, key, position_of)

    def pinnable_hits(self, admission: Admission) -> list[bytes]:
        """Resident chunks to hold besides the promoted ones, within the cap."""
        hits = [] if admission.expired else list(admission.hits)
        admission.begin(admission.step)
        return hits[: max(0, self.cap - self._book.held)]

    def _left(self, admission: Admission, free: int) -> int:
        """Chunks the request may still take. Its hits count as taken: a promotion
        that evicts the head of its own prefix is worth nothing."""
        unreserved = free - len(self._book.queued) - self.headroom
        return min(self.cap - self._book.held, unreserved) - admission.loose_hits

    # --- patience ---

    def _may_wait(self, admission: Admission) -> bool:
        if admission.holds or not admission.may_wait or not self._has_patience(admission):
            return False
        return not self._has_enough(admission)

    def _has_enough(self, admission: Admission) -> bool:
        """Whether it would gain little by waiting."""
        has = len(admission.hits) + len(admission.queue)
        # Most of a prefix with windows may well be of no use at all.
        return has >= self.most * (_ENOUGH if self._groups == 1 else 1.0)

    def _has_patience(self, admission: Admission) -> bool:
        since, patience = admission.waiting_since, self._book.settings.patience
        return patience > 0 and (since is None or self._book.clock() - since < patience)

    def _try_again(self, admission: Admission, room: int) -> bool:
        # Others may have read most of its prefix while it waited. Not with several groups:
        # hits come in during a step, and its answers must stay the same.
        enough = self._groups == 1 and self._has_enough(admission)
        if room <= admission.refused_room and not enough:
            if self._has_patience(admission):
                return False
            self._book.waits.end(admission, OUT_OF_PATIENCE)
        admission.waiting = False
        return True

    def _start_waiting(self, admission: Admission, room: int, key: bytes) -> None:
        """Give the queue back; its groups wait at their first keys."""
        admission.waiting = True
        admission.refused_room = room + len(admission.queue)
        if admission.waiting_since is None:
            admission.waiting_since = self._book.clock()
        self._book.waits.begin(admission)
        for queued in (*self._book.drop_queue(admission), key):
            admission.blocked.setdefault(queued[-4:], queued)

    def _blocked(self, admission: Admission, key: bytes) -> Verdict:
        first = admission.blocked.setdefault(key[-4:], key)
        return Verdict.WAIT if first == key else Verdict.REFUSE

    # --- several groups ---

    def _cut_the_first(
        self, admission: Admission, group: bytes, position_of: PositionOf | None
    ) -> bool:
        """A window finds no room because the prefix took it all: cut the prefix."""
        first = next(iter(admission.queue), b"")[-4:]
        count = sum(key[-4:] == first for key in admission.queue)
        if first in (b"", group) or first in admission.full or count < 2:
            return False
        admission.full.add(first)
        self._cut(admission, first, None, position_of)
        return True

    def _cut(
        self,
        admission: Admission,
        group: bytes,
        refused: bytes | None,
        position_of: PositionOf | None,
    ) -> None:
        """The group ends here: give a part of it back to the windows, note where."""
        queued = [key for key in admission.queue if key[-4:] == group]
        ends = [position_of(key) if position_of else None for key in (*queued, refused) if key]
        if None not in ends and len(ends) > 1 and ends[0] > ends[-1]:  # type: ignore[operator]
            return  # a window, searched from right to left
        kept = max(1, int(len(queued) * _CUT))
        for key in queued[kept:]:
            self._book.dequeue(admission, key)
        end = ends[min(kept, len(ends) - 1)]
        admission.limit = -1 if end is None else min(end, admission.limit or end)

    def _beyond_the_cut(
        self, admission: Admission, key: bytes, position_of: PositionOf | None
    ) -> Verdict | None:
        """None if `key` can still be of use."""
        assert admission.limit is not None
        if admission.limit < 0 or position_of is None:
            # Without positions (vLLM 0.30) the cut is known once what was taken has
            # landed; until then every group waits.
            if admission.flying or admission.queue:
                return self._blocked(admission, key)
            admission.limit = None
            return None
        position = position_of(key)
        return Verdict.REFUSE if position is not None and position >= admission.limit else None
