# SPDX-License-Identifier: Apache-2.0
"""Says in the log when a root falls back to buffered I/O while it is in use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_tiered_offload.ratelog import RateLimitedLog

if TYPE_CHECKING:
    from vllm_tiered_offload.store import RootStats, StoreStats

_INTERVAL = 1.0  # seconds; ticks come once a scheduler step


class DirectIoWatch:
    """Compares each root with what it was a moment ago.

    The store falls back by itself and goes on; nobody would notice the CPU time it costs.

    Args:
        read: the store's statistics.
        log: where the change goes.
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
            before = self._known.get(root.path, root)
            self._known[root.path] = root
            self._compare("read", before.direct_read, root.direct_read, root)
            self._compare("write", before.direct_write, root.direct_write, root)

    def _compare(self, way: str, before: bool, now: bool, root: RootStats) -> None:
        if before and not now:
            self._log.warning(
                (way, root.path),
                "%s: direct %s was refused; buffered from now on",
                root.path,
                way,
            )
