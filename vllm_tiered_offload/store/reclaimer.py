# SPDX-License-Identifier: Apache-2.0
"""Freeing slots ahead of need: the mechanism of eviction; ``eviction`` is the policy.

The root's oldest closed segment goes, whoever wrote it. Before it does, this process moves
the chunks that deserve it into what is left of its open segment. Loads are never held up.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

from vllm_tiered_offload.store import faults, locks
from vllm_tiered_offload.store.copier import Copier, Fetch
from vllm_tiered_offload.store.namespaces import is_alive
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.segment import Segment
from vllm_tiered_offload.store.slots import Removal
from vllm_tiered_offload.store.syscalls import explain

logger = logging.getLogger("vllm.tiered_offload.store")

HIT_GRACE = 1.0  # seconds a look-up's HIT keeps a segment: its load is on the way
# How far others may evict between two looks: one slot in 16, but not fewer than 2.
NEAR_EVICTION, LEAST_NEAR_EVICTION = 16, 2
# A second slot per writer is kept free where that costs no more than one slot in 24: the
# copies for one segment then have the time that another takes to fill.
SLOTS_TO_SPARE = 24


class Reclaimer:
    """Frees slots of one root, in its own thread or in a writer that found none."""

    def __init__(self, parts: Parts, fetch: Fetch, room: Callable[[], int]) -> None:
        self._parts = parts
        self.turn = threading.Lock()  # one victim at a time in this process
        self._wake = threading.Event()
        self._starving: set[int] = set()  # writers that wait for a slot
        self._freed = 0  # segments removed
        self._copier = Copier(parts, fetch, room, lambda: bool(self._starving))

    def wake(self) -> None:
        """A slot was taken: there may be too few left."""
        self._wake.set()

    def loop(self) -> None:
        """The thread: keeps slots free for the writers until the pool stops."""
        while not self._parts.pool.stopping:
            self._wake.wait(self._parts.settings.refresh_interval)
            self._wake.clear()
            try:
                self.keep_slots_free()
                self._rescue_from_others()
            except OSError as error:
                logger.debug("reclaiming in %s: %s", self._parts.root.path, explain(error))
            except Exception:
                logger.exception("reclaiming in %s", self._parts.root.path)

    def keep_slots_free(self) -> None:
        """Evicts until there is a slot, and room for it, for each writer.

        As many as are missing now, and no more: a file system that gives space back late, or
        to a snapshot, would ask for all there are.
        """
        with self.turn:
            if self._has_excess():
                self.trim()
        for _ in range(self._missing_slots(self._slots_ahead())):
            if self._parts.pool.stopping:
                return
            with self.turn:
                missing = self._missing_slots(self._slots_ahead())
                if missing <= 0 or not self._evict_prepared():
                    return

    def _rescue_from_others(self) -> None:
        """Where other processes evict too, what is hot here must move before its turn comes."""
        parts = self._parts
        if parts.clock() > parts.others_store_until or parts.pool.stopping:
            return
        near = max(LEAST_NEAR_EVICTION, parts.root.slots_when_full // NEAR_EVICTION)
        if self._missing_slots(self._slots_ahead() + near) <= 0:
            return
        with self.turn:
            parts.drain_hits()
            for segment in parts.catalogue.closed()[:near]:
                if not segment.examined:
                    segment.examined = self._copier.copy_hot(segment)
                    if not segment.examined:  # no room, or a writer that must not wait
                        return

    def free_one(self) -> bool:
        """Called by a writer without a slot: evicts one segment at once, copying nothing.

        If it had to wait for an eviction, that one is enough.
        """
        me, before = threading.get_ident(), self._freed
        self._starving.add(me)
        try:
            with self.turn:
                return self._freed > before or self._evict_coldest()
        finally:
            self._starving.discard(me)

    def trim(self) -> None:
        """Removes what lies at or above slot N, and what holds nothing."""
        parts = self._parts
        for path in list(parts.catalogue.leftovers):
            with parts.root.lock.hold():
                removal = parts.slots.remove(path, 0)
            parts.catalogue.leftovers.discard(path)
            if removal is Removal.DONE:
                parts.counters.add(removed_leftovers=1)
            elif removal is Removal.REFUSED:
                parts.catalogue.strangers.add(path)  # it keeps its slot; not tried again
        limit = parts.root.slots
        for segment in parts.catalogue.closed():
            if segment.header.slot >= limit and not segment.undeletable:
                self._evict(segment)

    def _has_excess(self) -> bool:
        """Whether there is something that ``trim`` would remove."""
        catalogue, limit = self._parts.catalogue, self._parts.root.slots
        above = (segment for segment in catalogue.closed() if segment.header.slot >= limit)
        return bool(catalogue.leftovers) or any(not found.undeletable for found in above)

    def _slots_ahead(self) -> int:
        """How many slots are to be free."""
        parts, writers = self._parts, self._parts.writers
        return writers * (2 if parts.root.slots_when_full >= SLOTS_TO_SPARE * writers else 1)

    def _missing_slots(self, wanted: int) -> int:
        """How many segments have to go so that so many more have slots and room; 0 or less if
        none."""
        free = self._parts.root.slots - len(self._parts.catalogue)
        return max(wanted - free, self._parts.slots.lacking_space(wanted))

    def _prepare(self, victim: Segment, began: float) -> bool:
        """Copies what is hot. False if there is reason to wait: the rest fits into the next
        segment, or a load of what could not be copied is on the way."""
        copied = self._copier.copy_hot(victim)
        self._parts.drain_hits()
        if not copied or victim.hit_at >= began:
            return False
        return self._is_cold(victim) or not self._copier.holds_hot(victim)

    def _may_wait(self) -> bool:
        """Whether each writer has a slot to go on with."""
        return self._missing_slots(self._parts.writers) <= 0

    def _is_cold(self, segment: Segment) -> bool:
        """Whether no load of it is to be expected."""
        return segment.hit_at < self._parts.clock() - HIT_GRACE

    def _candidates(self) -> list[Segment]:
        """Victims in order: of dead private namespaces, then the oldest."""
        parts = self._parts
        parts.drain_hits()
        closed = [segment for segment in parts.catalogue.closed() if not segment.undeletable]
        useless: set[str] = set()
        if any(segment.header.private for segment in closed):
            with parts.root.lock.hold():
                useless = self._dead_namespaces(closed)
        closed.sort(key=lambda segment: segment.header.fingerprint not in useless)  # stable
        return closed

    def _dead_namespaces(self, segments: Sequence[Segment]) -> set[str]:
        """Private namespaces whose process is gone: nothing in them can be hit again.

        Under the root lock: of two that ask at once, one would take the other for the owner.
        """
        private = {
            segment.header.fingerprint for segment in segments if segment.header.private
        } - {self._parts.namespace.fingerprint}
        return {name for name in private if not is_alive(self._parts.root, name)}

    def _evict_prepared(self) -> bool:
        """The oldest, once its hot chunks have moved: no look-up, however often it comes,
        keeps a segment in which nothing else is hot. False also where it pays to wait."""
        for segment in self._candidates():
            if self._starving:  # a writer has no time for copies
                break
            if segment.loads:
                continue
            faults.point("reclaimer.victim_chosen")
            began = self._parts.clock()
            ready = self._prepare(segment, began)
            if not ready and self._may_wait():
                return False
            if (ready or self._is_cold(segment)) and self._evict(segment, unless_hit=began):
                return True
        return not self._may_wait() and self._evict_coldest()

    def _evict_coldest(self) -> bool:
        """At once, without copies: the oldest of which no load is to be expected, else the
        oldest."""
        candidates = self._candidates()
        for segment in sorted(candidates, key=lambda found: not self._is_cold(found)):
            faults.point("reclaimer.victim_chosen")
            if segment.loads == 0 and self._evict(segment):
                return True
        return False

    def _evict(self, segment: Segment, *, unless_hit: float = math.inf) -> bool:
        """Removes this segment, if it lets itself be removed, and if nothing was found in it
        since ``unless_hit``."""
        with self._parts.watch.operation(), self._parts.root.lock.hold():
            claim = self._claim(segment, unless_hit)
            expired = claim is not None and bool(self._dead_namespaces([segment]))
        return claim is not None and self._finish(segment, claim, expired=expired)

    def _claim(self, segment: Segment, unless_hit: float) -> int | None:
        """The victim's locked descriptor, once nothing here reads it. Under the root lock."""
        parts = self._parts
        claim = parts.slots.claim(segment.path, segment.sequence)
        if claim is Removal.CHANGED:
            parts.lose(segment)
        if claim is Removal.REFUSED:
            self._give_up(segment)
        if isinstance(claim, Removal):
            return None
        parts.drain_hits()  # the root lock may have been long in coming
        with parts.index.lock:
            if segment.loads or segment.hit_at >= unless_hit:
                locks.close(claim)
                return None
            segment.gone = True
            parts.slots.removed.append(segment.sequence)
        return claim

    def _finish(self, segment: Segment, fd: int, *, expired: bool) -> bool:
        parts = self._parts
        chunks = parts.forget(segment)
        with parts.watch.operation():
            removal = parts.slots.finish(segment.path, fd)
        if removal is not Removal.DONE:
            self._give_up(segment)
            parts.catalogue.find_odd(segment.path, leftover=False)
            return False
        self._freed += 1
        size = segment.header.segment_bytes
        parts.counters.add(evicted_segments=1, evicted_chunks=chunks, evicted_bytes=size)
        if expired:
            parts.counters.add(expired_bytes=size)
        return True

    def _give_up(self, segment: Segment) -> None:
        segment.undeletable = True
        self._parts.counters.add(undeletable_segments=1)
        logger.warning("%s cannot be removed; it keeps its slot", segment.path)
