# SPDX-License-Identifier: Apache-2.0
"""Who waits for room in the pool now, and how earlier waits ended.

Pure, like `pins.py`. One request may wait more than once; each wait is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

IN_TIME: Final = "in_time"  # there was room, or others brought what it wanted
OUT_OF_PATIENCE: Final = "out_of_patience"  # it goes on with what it has
GONE: Final = "gone"  # the request ended, or the cache was reset
OUTCOMES: Final = (IN_TIME, OUT_OF_PATIENCE, GONE)


class Waits:
    """Open waits by waiter, ended ones by outcome.

    Attributes:
        count: waits that have ended.
        ended: those, by outcome.
        seconds: how long those took together, by outcome.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.count = 0
        self.ended = dict.fromkeys(OUTCOMES, 0)
        self.seconds = dict.fromkeys(OUTCOMES, 0.0)
        self._clock = clock
        self._since: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def begin(self, waiter: Hashable) -> None:
        """A second call for the same wait changes nothing."""
        if waiter not in self._since:
            self._since[waiter] = self._clock()

    def end(self, waiter: Hashable, outcome: str) -> None:
        """Does nothing for a waiter that does not wait."""
        since = self._since.pop(waiter, None)
        if since is not None:
            self.count += 1
            self.ended[outcome] += 1
            self.seconds[outcome] += self._clock() - since
