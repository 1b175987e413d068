# SPDX-License-Identifier: Apache-2.0
"""Which waiting request may take how much of the CPU pool for promotions.

Pure bookkeeping: no vLLM, no I/O, the clock is a parameter. The rules:

* A promoted chunk is pinned for the request that waits for it, and so are the
  resident chunks of the same prefix. Otherwise a prefix larger than the pool
  evicts itself and is read from disk for ever.
* All pins together stay below a share of the pool, promotions leave head-room
  for stores, and one request's pins end after a deadline.
* A request that holds pins never waits for more room (no hold and wait): it is
  told MISS and starts with what it has. Without pins it may wait, for a bounded
  time, if others hold most of what it could get.
* In one admission (from the first look-up to the start) a key is read from a
  tier at most once, so the bytes read never exceed the prefix, and a chunk
  whose load failed is a miss.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_ENOUGH = 0.75  # of what waiting could give: then take it now
_GROUP_SHARE = 0.75  # of one request's room, for one of several KV groups


@dataclass(frozen=True, slots=True)
class PinSettings:
    """Bounds of promotions.

    Args:
        max_share: part of the pool (0 < share <= 1) that pins and promotions in
            flight may hold together.
        deadline: seconds after which a request's pins end although it has not
            started.
        patience: seconds an admission may wait for room before it takes what is
            there; 0 never waits.
        store_headroom: part of the pool (0 <= share < 1) that promotions leave
            to stores.

    Raises:
        ValueError: a value out of its range, named.
    """

    max_share: float = 0.8
    deadline: float = 5.0
    patience: float = 2.0
    store_headroom: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.max_share <= 1:
            raise ValueError(f"pin_share: {self.max_share} is not in (0, 1]")
        if not 0 <= self.store_headroom < 1:
            raise ValueError(f"store_headroom: {self.store_headroom} is not in [0, 1)")
        if not self.deadline > 0:
            raise ValueError(f"pin_deadline: {self.deadline} s is not above 0")
        if not self.patience >= 0:
            raise ValueError(f"patience: {self.patience} s is negative")


class Verdict(enum.Enum):
    """Answer to one request for one chunk of room."""

    TAKE = enum.auto()  # queued for promotion at the end of the step
    WAIT = enum.auto()  # ask again in a later step
    FULL = enum.auto()  # no room: this group of the request gets no more
    REFUSE = enum.auto()  # settled before, or the key was tried already


@dataclass(slots=True, eq=False)
class Admission:
    """One request between its first look-up and its start."""

    request: object
    may_wait: bool = True
    stale: bool = False  # was alive at a reset: its blocks are not stored
    queue: dict[bytes, int] = field(default_factory=dict)  # key -> tier, this step
    hits: dict[bytes, None] = field(default_factory=dict)  # resident, this step
    tried: set[bytes] = field(default_factory=set)
    flying: set[bytes] = field(default_factory=set)
    pinned: set[bytes] = field(default_factory=set)
    full: set[bytes] = field(default_factory=set)  # groups that get no more
    taken: Counter[bytes] = field(default_factory=Counter)  # chunks a group took
    limit: int | None = None  # token position from which nothing can be used
    waiting: bool = False
    waiting_since: float | None = None
    refused_room: int = 0
    blocked: dict[bytes, bytes] = field(default_factory=dict)  # group -> key, this step
    pinned_since: float | None = None
    expired: bool = False
    step: int = -1

    @property
    def holds(self) -> bool:
        return bool(self.pinned or self.flying)


class PinBook:
    """All admissions of one pool of `num_chunks` chunks."""

    def __init__(
        self,
        num_chunks: int,
        settings: PinSettings,
        *,
        groups: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.num_chunks = num_chunks
        self.cap = max(1, int(num_chunks * settings.max_share)) if num_chunks else 0
        self.headroom = int(num_chunks * settings.store_headroom)
        self.queued: dict[bytes, Admission] = {}
        self._groups = groups
        self._clock = clock
        self._step = 0
        self._pins: dict[bytes, int] = {}  # key -> pins on it
        self._flying = 0
        self._admissions: dict[str, Admission] = {}
        self._touched: dict[Admission, None] = {}
        self._holders: dict[Admission, None] = {}  # in the order of pinned_since

    # --- admissions ---

    def admit(self, request_id: str, request: object, *, may_wait: bool = True) -> None:
        self._admissions[request_id] = Admission(request, may_wait=may_wait)

    def find(self, request_id: str, request: object) -> Admission | None:
        """The admission of exactly this request object, not of its namesake."""
        admission = self._admissions.get(request_id)
        return admission if admission and admission.request is request else None

    def forget(self, request_id: str) -> None:
        """Drop an admission whose pins have been released."""
        self._admissions.pop(request_id, None)

    def restart(self, admission: Admission) -> list[bytes]:
        """End this admission, keep the request; returns the keys to unpin."""
        keys = self.release(admission)
        for key in admission.queue:
            self.queued.pop(key, None)
        admission.queue.clear()
        admission.hits.clear()
        admission.tried.clear()
        admission.flying.clear()
        admission.full.clear()
        admission.taken.clear()
        admission.blocked.clear()
        admission.limit = admission.waiting_since = None
        admission.waiting = admission.expired = False
        self._touched.pop(admission, None)
        return keys

    def reset(self) -> None:
        """Forget all pins (their chunks are gone); requests alive become stale."""
        self._pins.clear()
        self._holders.clear()
        for admission in self._admissions.values():
            admission.pinned.clear()
            self.restart(admission)
            admission.stale = True

    # --- look-ups ---

    def saw_hit(self, admission: Admission, key: bytes) -> None:
        """A resident chunk of the request: part of what it could start with."""
        if admission.step != self._step:
            self._new_step(admission)
        if key not in admission.pinned:
            admission.hits[key] = None
            if admission.holds:
                self._touched[admission] = None

    def ask(
        self,
        admission: Admission,
        key: bytes,
        tier: int,
        free: int,
        position_of: Callable[[bytes], int | None] | None = None,
    ) -> Verdict:
        """May this request promote `key` from tier number `tier`?

        Args:
            free: rows of the pool that are free or evictable now.
            position_of: a key's last token position, where vLLM records it.
        """
        if admission.step != self._step:
            self._new_step(admission)
        group = key[-4:]
        if key in admission.tried or group in admission.full:
            return Verdict.REFUSE
        if admission.limit is not None and position_of is not None:
            position = position_of(key)
            if position is not None and position >= admission.limit:
                return Verdict.REFUSE
        room = self._room(admission, free)
        if admission.waiting:
            if not self._try_again(admission, room):
                return self._block(admission, group, key)
            admission.waiting = False
        if room > 0 and not self._group_is_full(admission, group, room):
            admission.queue[key] = tier
            admission.taken[group] += 1
            self.queued[key] = admission
            self._touched[admission] = None
            return Verdict.TAKE
        if room <= 0 and self._may_wait(admission, room):
            return self._start_waiting(admission, group, key, room)
        admission.full.add(group)
        if position_of is not None:
            self._limit(admission, group, key, position_of)
        return Verdict.FULL

    def _new_step(self, admission: Admission) -> None:
        admission.step = self._step
        admission.hits.clear()
        admission.blocked.clear()

    def _room(self, admission: Admission, free: int) -> int:
        """Chunks this request may still take. Its own hits count as taken: a
        promotion that evicts the head of the same prefix is worth nothing."""
        held = len(self._pins) + self._flying + len(self.queued)
        unreserved = free - len(self.queued) - self.headroom
        return min(self.cap - held, unreserved) - len(admission.hits)

    def _group_is_full(self, admission: Admission, group: bytes, room: int) -> bool:
        """With several KV groups no single one takes all: a full-attention
        prefix without its sliding windows cannot be used."""
        if self._groups < 2:
            return False
        total = room + admission.taken.total()
        return admission.taken[group] + 1 > max(1.0, total * _GROUP_SHARE)

    # --- patience ---

    def _may_wait(self, admission: Admission, room: int) -> bool:
        if admission.holds or not admission.may_wait or not self._has_patience(admission):
            return False
        possible = min(self.cap, self.num_chunks - self.headroom) - len(admission.hits)
        return room + len(admission.queue) < possible * _ENOUGH

    def _has_patience(self, admission: Admission) -> bool:
        since = admission.waiting_since
        return self.settings.patience > 0 and (
            since is None or self._clock() - since < self.settings.patience
        )

    def _try_again(self, admission: Admission, room: int) -> bool:
        return room > admission.refused_room or not self._has_patience(admission)

    def _start_waiting(
        self, admission: Admission, group: bytes, key: bytes, room: int
    ) -> Verdict:
        """Give the queue back and wait. Every group's first key of this step
        answers WAIT from now on, also the ones queued a moment ago."""
        admission.waiting = True
        admission.refused_room = room + len(admission.queue)
        if admission.waiting_since is None:
            admission.waiting_since = self._clock()
        for queued in admission.queue:
            admission.blocked.setdefault(queued[-4:], queued)
            self.queued.pop(queued, None)
        admission.queue.clear()
        admission.taken.clear()
        admission.blocked.setdefault(group, key)
        # WAIT, not REFUSE, whatever was queued: a scan from right to left
        # forgets at a miss what it had waited for.
        return Verdict.WAIT

    def _block(self, admission: Admission, group: bytes, key: bytes) -> Verdict:
        first = admission.blocked.setdefault(group, key)
        return Verdict.WAIT if first == key else Verdict.REFUSE

    def _limit(
        self,
        admission: Admission,
        group: bytes,
        key: bytes,
        position_of: Callable[[bytes], int | None],
    ) -> None:
        """A scan from left to right that ends at `key` also ends what the other
        groups can use; one from right to left (a sliding window) does not."""
        seen = (*reversed(admission.queue), *reversed(admission.hits), *admission.pinned)
        before = next((other for other in seen if other[-4:] == group), None)
        here = position_of(key)
        there = position_of(before) if before is not None else None
        if here is not None and there is not None and there < here:
            admission.limit = min(here, admission.limit or here)

    # --- pins ---

    def end_step(self) -> list[Admission]:
        """The admissions with something to promote or to pin; a new step begins."""
        touched = list(self._touched)
        self._touched.clear()
        self._step += 1
        return touched

    def hits_to_pin(self, admission: Admission) -> list[bytes]:
        """Resident chunks to hold together with the promoted ones, within the cap."""
        held = len(self._pins) + self._flying + len(admission.queue)
        hits = [] if admission.expired else list(admission.hits)
        admission.hits.clear()
        return hits[: max(0, self.cap - held)]

    def take_queue(self, admission: Admission) -> dict[bytes, int]:
        """The keys to promote now, with their tiers."""
        queue = admission.queue
        admission.queue = {}
        for key in queue:
            self.queued.pop(key, None)
        return queue

    def launched(self, admission: Admission, keys: Iterable[bytes]) -> None:
        before = len(admission.flying)
        admission.flying.update(keys)
        admission.tried.update(admission.flying)
        self._flying += len(admission.flying) - before

    def landed(
        self, admission: Admission | None, keys: Iterable[bytes], ok: Iterable[bytes]
    ) -> list[bytes]:
        """A promotion ended; returns those of the `ok` keys to pin.

        None for a request that is gone. A request that has started since pins
        nothing either: it would keep the pins for good.
        """
        keys = list(keys)
        self._flying -= len(keys)
        if admission is None:
            return []
        mine = admission.flying.intersection(keys)
        admission.flying -= mine
        return [] if admission.expired else [key for key in ok if key in mine]

    def pin(self, admission: Admission, keys: Iterable[bytes]) -> None:
        """Record pins taken in the pool; `keys` hold none of this request yet."""
        if admission.pinned_since is None:
            admission.pinned_since = self._clock()
            self._holders[admission] = None
        for key in keys:
            admission.pinned.add(key)
            self._pins[key] = self._pins.get(key, 0) + 1

    def release(self, admission: Admission) -> list[bytes]:
        """Forget a request's pins; returns the keys to unpin in the pool."""
        keys = list(admission.pinned)
        admission.pinned.clear()
        admission.pinned_since = None
        self._holders.pop(admission, None)
        for key in keys:
            count = self._pins.get(key, 0) - 1
            if count > 0:
                self._pins[key] = count
            else:
                self._pins.pop(key, None)
        return keys

    def expired(self) -> list[Admission]:
        """Admissions whose pins are older than the deadline; they get no more."""
        if not self._holders:
            return []
        before = self._clock() - self.settings.deadline
        late = []
        for admission in self._holders:
            if admission.pinned_since is None or admission.pinned_since > before:
                break
            late.append(admission)
            admission.expired = True
        return late

    def counts(self) -> dict[str, int]:
        """Chunks pinned and in flight, requests known: all 0 when idle."""
        return {
            "requests": len(self._admissions),
            "pinned": len(self._pins),
            "in_flight": self._flying,
            "queued": len(self.queued),
        }
