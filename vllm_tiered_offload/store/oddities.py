# SPDX-License-Identifier: Apache-2.0
"""Files that are not as they should be: said once, and read again ever more rarely."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from vllm_tiered_offload.store.counters import Counters
from vllm_tiered_offload.store.syscalls import EXHAUSTED, explain

logger = logging.getLogger("vllm.tiered_offload.store")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0  # seconds
_MOST = 10_000  # remembered

Identity = tuple[int, int]  # inode and ctime_ns


class Oddities:
    """What is known of the odd files of one root. Thread safe."""

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._clock = clock
        self._reported: dict[str, Identity] = {}
        self._retries: dict[Hashable, tuple[float, float]] = {}  # when, and the pause before it

    def clear(self) -> None:
        self._reported.clear()
        self._retries.clear()

    def knows(self, path: str, identity: Identity) -> bool:
        """Whether the file was reported in this state."""
        return self._reported.get(path) == identity

    def report(self, path: str, identity: Identity, what: str, detail: str) -> None:
        """Counts and logs a file, once for each state it is seen in."""
        if self.knows(path, identity):
            return
        if len(self._reported) > _MOST:
            self._reported.clear()
        self._reported[path] = identity
        self._counters.count("newer_segments" if what == "newer" else f"damaged.{what}")
        logger.warning("%s: %s: %s", path, what, detail)

    def unreadable(self, path: str, file: Hashable, error: OSError) -> None:
        """Reading failed. ``file`` tells this one from others in its slot. A disk may take half
        a minute to give up a bad sector, so it is not asked at every refresh."""
        if error.errno in EXHAUSTED:
            return
        self.report(path, (0, 0), "unreadable", explain(error))
        _, before = self._retries.get(file, (0.0, FIRST_PAUSE / 2))
        pause = min(2 * before, LONGEST_PAUSE)
        if len(self._retries) > _MOST:
            self._retries.clear()
        self._retries[file] = (self._clock() + pause, pause)

    def readable(self, file: Hashable) -> None:
        self._retries.pop(file, None)

    def may_read(self, file: Hashable) -> bool:
        """False for a while after it could not be read."""
        retry = self._retries.get(file)
        return retry is None or self._clock() >= retry[0]
