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
            if now.paused is None:
                log.info(("stores", path), "%s: stores resumed", path)
            else:
                log.warning(
                    ("stores", path), "%s: stores paused: %s; loads go on", path, now.paused
                )
        if now.stalled != before.stalled:
            if now.stalled:
                log.warning(
                    ("stall", path),
                    "%s: no operation has ended for a while; look-ups answer MISS until one "
                    "does",
                    path,
                )
            else:
                log.info(("stall", path), "%s: the disk moves again", path)
        if before.direct_io and not now.direct_io:
            log.warning(
                ("direct", path), "%s: direct I/O was refused; buffered from now on", path
            )
