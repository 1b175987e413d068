# SPDX-License-Identifier: Apache-2.0
"""How much of the CPU pool a request may take for promotions, and when it waits.

Pure, like `pins.py`. The rules:

* All pins and promotions together stay below a share of the pool, and leave
  head-room for stores.
* A request that holds pins never waits for more (no hold and wait): the group
  of keys that found no room is told to stop, and the request starts with what
  it has. Without pins it may wait, for a bounded time, as long as others hold
  most of what it could get.
* With several KV groups no single one takes all the room: a full-attention
  prefix without its sliding windows cannot be used.
"""

from __future__ import annotations

import enum

from vllm_tiered_offload.pins import Admission, PinBook

_ENOUGH = 0.75  # of what waiting could give: then take it now
_GROUP_SHARE = 0.75  # of a request's room for one of several groups


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
        self._most = min(self.cap, num_chunks - self.headroom)
        self._groups = groups
        self._book = book

    def ask(self, admission: Admission, key: bytes, tier: int, free: int) -> Verdict:
        """May this request promote `key` from tier number `tier`?

        Args:
            free: rows of the pool that are free or evictable now.
        """
        if admission.step != self._book.step:
            admission.begin(self._book.step)
        group = key[-4:]
        if key in admission.tried or group in admission.full:
            return Verdict.REFUSE
        if admission.cut_short and (admission.flying or admission.queue):
            # Another group ends early. Where, vLLM knows once its promotions have
            # ended; a window read before that would be the wrong one.
            return self._blocked(admission, group, key)
        admission.cut_short = False
        room = self._left(admission, free)
        if admission.waiting:
            if room <= admission.refused_room and self._has_patience(admission):
                return self._blocked(admission, group, key)
            admission.waiting = False
        if room > 0 and not self._has_its_share(admission, group, room):
            self._book.enqueue(admission, key, tier)
            return Verdict.TAKE
        if self._may_wait(admission, room):
            self._start_waiting(admission, room, key)
            # Not REFUSE, even if keys of the group were queued: a search from
            # right to left forgets at a miss what it had waited for.
            return Verdict.WAIT
        admission.full.add(group)
        admission.cut_short = True
        return Verdict.FULL

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

    def _has_its_share(self, admission: Admission, group: bytes, room: int) -> bool:
        if self._groups < 2:
            return False
        total = room + admission.taken.total()
        return admission.taken[group] >= max(1.0, total * _GROUP_SHARE)

    # --- patience ---

    def _may_wait(self, admission: Admission, room: int) -> bool:
        if admission.holds or not admission.may_wait or not self._has_patience(admission):
            return False
        has = len(admission.hits) + len(admission.queue) + max(0, room)
        return has < self._most * _ENOUGH

    def _has_patience(self, admission: Admission) -> bool:
        since, patience = admission.waiting_since, self._book.settings.patience
        return patience > 0 and (since is None or self._book.clock() - since < patience)

    def _start_waiting(self, admission: Admission, room: int, key: bytes) -> None:
        """Give the queue back; its groups wait at their first keys."""
        admission.waiting = True
        admission.refused_room = room + len(admission.queue)
        if admission.waiting_since is None:
            admission.waiting_since = self._book.clock()
        for queued in (*self._book.drop_queue(admission), key):
            admission.blocked.setdefault(queued[-4:], queued)
        admission.taken.clear()

    def _blocked(self, admission: Admission, group: bytes, key: bytes) -> Verdict:
        first = admission.blocked.setdefault(group, key)
        return Verdict.WAIT if first == key else Verdict.REFUSE
