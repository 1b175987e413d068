# SPDX-License-Identifier: Apache-2.0
"""Says in the log what changed about a disk, once a change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_tiered_offload.ratelog import RateLimitedLog

if TYPE_CHECKING:
    from vllm_tiered_offload.store import RootStats, StoreStats

_INTERVAL = 1.0  # seconds; ticks come once a scheduler step


class StateWatch:
    """Compares each root with what it was a moment ago.

    Args:
        read: the store's statistics.
        log: where changes go; a state that flips to and fro is thinned out there.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        read: Callable[[], StoreStats],
        log: RateLimitedLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._log = log
        self._clock = clock
        self._next = clock() + _INTERVAL
        self._known = {root.path: root for root in read().roots}

    def tick(self) -> None:
        """Look at the roots, at most once a second."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        for root in self._read().roots:
            before = self._known.get(root.path)
            self._known[root.path] = root
            if before is not None:
                self._compare(before, root)

    def _compare(self, before: RootStats, now: RootStats) -> None:
        path, log = now.path, self._log
        if now.paused != before.paused:
            self._say_paused(path, now.paused)
        if now.stalled and not before.stalled:
            log.warning(
                ("stall", path),
                "%s: no operation ends; look-ups answer MISS until one does",
                path,
            )
        elif before.stalled and not now.stalled:
            log.info(("moves", path), "%s: operations end again", path)
        for direction in ("read", "write"):
            field = f"direct_{direction}"
            if getattr(before, field) and not getattr(now, field):
                log.warning(
                    (field, path),
                    "%s: direct %s was refused; buffered from now on",
                    path,
                    direction,
                )

    def _say_paused(self, path: str, reason: str | None) -> None:
        # Not one topic: the end of a pause must not be hidden by its start.
        if reason is None:
            self._log.info(("resumed", path), "%s: stores resumed", path)
        else:
            self._log.warning(
                ("paused", path), "%s: stores paused: %s; loads go on", path, reason
            )
