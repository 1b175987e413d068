# SPDX-License-Identifier: Apache-2.0
"""Who holds which chunk of the pool for a request that has not started yet.

Pure bookkeeping: no vLLM, no I/O, the clock is a parameter. A promoted chunk is
pinned for the request that waits for it, and so are the resident chunks of the
same prefix; otherwise a prefix larger than the pool evicts itself and is read
from disk for ever. Pins end when the request starts or ends, at a reset, or at
a deadline. How many there may be is decided in `room.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from vllm_tiered_offload.waits import GONE, IN_TIME, Waits


@dataclass(frozen=True, slots=True)
class PinSettings:
    """Bounds of promotions.

    Args:
        max_share: part of the pool (0 < share <= 1) that pins and promotions in
            flight may hold together.
        deadline: seconds after which a request's pins end although it has not
            started, and after which nobody waits for a promotion any more.
        patience: seconds an admission may wait for room before it takes what is
            there; 0 never waits.
        store_headroom: part of the pool (0 <= share < 1) that promotions leave
            to stores.

    Raises:
        ValueError: a value out of its range, named by its configuration key.
    """

    max_share: float = 0.8
    deadline: float = 10.0
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


@dataclass(slots=True, eq=False)
class Admission:
    """One request's way from its first look-up to its start.

    A key is read from a tier at most once in it (`tried`), so the bytes read
    never exceed the prefix, and a chunk whose load failed is a miss.
    """

    request: Any  # vLLM's ReqContext; here it is only compared
    may_wait: bool = True
    stale: bool = False  # was alive at a reset: its blocks are not stored
    # Of the current step:
    step: int = -1
    queue: dict[bytes, int] = field(default_factory=dict)  # key -> tier to read from
    hits: dict[bytes, None] = field(default_factory=dict)  # resident, not pinned by it
    loose_hits: int = 0  # of those, pinned by nobody
    blocked: dict[bytes, bytes] = field(default_factory=dict)  # group -> key that waits
    # Of the whole admission:
    tried: set[bytes] = field(default_factory=set)
    flying: set[bytes] = field(default_factory=set)
    pinned: set[bytes] = field(default_factory=set)
    pinned_since: float | None = None
    expired: bool = False
    full: set[bytes] = field(default_factory=set)  # groups that get no more
    limit: int | None = None  # token position of the cut; -1: not known
    waiting: bool = False
    waiting_since: float | None = None
    refused_room: int = 0

    @property
    def holds(self) -> bool:
        return bool(self.pinned or self.flying)

    def begin(self, step: int) -> None:
        """Forget what the last step's look-ups found."""
        self.step = step
        self.hits.clear()
        self.loose_hits = 0
        self.blocked.clear()

    def restart(self) -> None:
        """A new admission of the same request; pins and queue are handed back before."""
        self.begin(-1)
        for part in (self.tried, self.flying, self.full):
            part.clear()
        self.limit = self.waiting_since = None
        self.waiting = self.expired = False


class PinBook:
    """The admissions of one pool, with their queued keys, promotions and pins."""

    def __init__(
        self, settings: PinSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.step = 0
        self.waits = Waits(clock)
        self.expired_requests = 0  # that lost their pins at the deadline
        self.queued: dict[bytes, Admission] = {}
        self._flying: dict[bytes, float] = {}  # key -> when its promotion began
        self.stuck: set[bytes] = set()  # promotions past the deadline: not waited for
        self._pins: dict[bytes, int] = {}  # key -> requests that hold it
        self._admissions: dict[str, Admission] = {}
        self._touched: dict[Admission, None] = {}
        self._holders: dict[Admission, None] = {}  # in the order of `pinned_since`

    @property
    def pinned(self) -> int:
        """Chunks that somebody holds."""
        return len(self._pins)

    @property
    def flying(self) -> int:
        """Chunks that are being read."""
        return len(self._flying)

    @property
    def held(self) -> int:
        """Chunks pinned, being filled, or queued to be."""
        return len(self._pins) + len(self._flying) + len(self.queued)

    # --- requests ---

    def admit(self, request_id: str, request: Any, *, may_wait: bool = True) -> None:
        self._admissions[request_id] = Admission(request, may_wait=may_wait)

    def find(self, request_id: str, request: Any) -> Admission | None:
        """The admission of exactly this request object, not of a namesake."""
        admission = self._admissions.get(request_id)
        return admission if admission and admission.request is request else None

    def forget(self, request_id: str) -> None:
        """Drop a request whose admission has been ended."""
        self._admissions.pop(request_id, None)

    def close(self) -> None:
        """Forget everything: the pool is gone."""
        self._admissions.clear()
        self.queued.clear()

    def end_admission(self, admission: Admission, *, gone: bool = False) -> list[bytes]:
        """The request has started or is gone; returns the keys to unpin."""
        self.waits.end(admission, GONE if gone else IN_TIME)
        self.drop_queue(admission)
        self._touched.pop(admission, None)
        keys = self.release(admission)
        admission.restart()
        return keys

    def reset(self) -> None:
        """The pool is empty: no pins, and every request alive becomes stale."""
        for admission in self._admissions.values():
            self.end_admission(admission, gone=True)
            admission.stale = True

    # --- the step ---

    def saw_hit(self, admission: Admission, key: bytes) -> None:
        """A resident chunk of the request, part of what it could start with."""
        if admission.step != self.step:
            admission.begin(self.step)
        if key in admission.pinned or key in admission.hits:
            return
        admission.hits[key] = None
        admission.loose_hits += key not in self._pins
        if admission.holds:
            self._touched[admission] = None

    def enqueue(self, admission: Admission, key: bytes, tier: int) -> None:
        admission.queue[key] = tier
        self.queued[key] = admission
        self._touched[admission] = None

    def dequeue(self, admission: Admission, key: bytes) -> None:
        del admission.queue[key], self.queued[key]

    def drop_queue(self, admission: Admission) -> dict[bytes, int]:
        """Take a request's queued keys out; returns them with their tiers."""
        queue, admission.queue = admission.queue, {}
        for key in queue:
            self.queued.pop(key, None)
        return queue

    def end_step(self) -> list[Admission]:
        """Those with something to pin or to promote; a new step begins."""
        touched = list(self._touched)
        self._touched.clear()
        self.step += 1
        self.stuck = self._overdue_promotions()
        return touched

    def _overdue_promotions(self) -> set[bytes]:
        before = self.clock() - self.settings.deadline
        return set(takewhile(lambda key: self._flying[key] < before, self._flying))

    # --- promotions and pins ---

    def launched(self, admission: Admission, keys: Collection[bytes]) -> None:
        self.waits.end(admission, IN_TIME)
        self._flying.update(dict.fromkeys(keys, self.clock()))
        admission.flying.update(keys)
        admission.tried.update(keys)

    def landed(
        self, admission: Admission | None, keys: Collection[bytes], ok: Iterable[bytes]
    ) -> list[bytes]:
        """A promotion has ended; returns those of the `ok` keys to pin.

        A request that is gone (None), or has started since, pins nothing: no
        load would ever end such a pin.
        """
        for key in keys:
            self._flying.pop(key, None)
        if admission is None:
            return []
        mine = admission.flying.intersection(keys)
        admission.flying -= mine
        mine -= admission.pinned
        return [] if admission.expired else [key for key in ok if key in mine]

    def pin(self, admission: Admission, keys: Iterable[bytes]) -> None:
        """Record pins; `keys` are not pinned by this request yet."""
        if admission.pinned_since is None:
            admission.pinned_since = self.clock()
            self._holders[admission] = None
        admission.pinned.update(keys)
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def release(self, admission: Admission) -> list[bytes]:
        """Forget a request's pins; returns the keys to unpin."""
        keys = list(admission.pinned)
        admission.pinned.clear()
        admission.pinned_since = None
        self._holders.pop(admission, None)
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
        return keys

    def overdue(self) -> list[Admission]:
        """Admissions whose pins are past the deadline; they get no more pins."""
        overdue = []
        for admission in self._holders:
            since = admission.pinned_since
            if since is None or self.clock() - since < self.settings.deadline:
                break
            admission.expired = True
            overdue.append(admission)
        self.expired_requests += len(overdue)
        return overdue

    def counts(self) -> dict[str, int]:
        """All 0 when nothing is under way."""
        return {
            "requests": len(self._admissions),
            "pinned": self.pinned,
            "flying": self.flying,
            "queued": len(self.queued),
            "waiting": len(self.waits),
        }
