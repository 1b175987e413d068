# SPDX-License-Identifier: Apache-2.0
"""How long the oldest system call has been running, and whether stores are welcome."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger("vllm.tiered_offload.store")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0


class Watch:
    """Start times of the calls in flight on one root; each thread has at most one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started: dict[int, float] = {}

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Around everything that waits for the disk."""
        me = threading.get_ident()
        if me in self._started:  # part of a longer operation
            yield
            return
        self._started[me] = self._clock()
        try:
            yield
        finally:
            del self._started[me]

    def oldest_age(self) -> float:
        """Seconds the oldest call has been running; 0.0 without one."""
        started = list(self._started.values())
        return self._clock() - min(started) if started else 0.0


class Pause:
    """Stores to a root stop after a failure and are tried again later, ever more rarely.

    Says so once when it begins and once when it ends.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._length = FIRST_PAUSE
        self._until = 0.0
        self.reason: str | None = None

    def begin(self, reason: str) -> None:
        """Stores do not work, for ``reason``. What was queued before says so again and again,
        which is no further try."""
        if self.active:
            return
        if self.reason is None:
            logger.warning(
                "%s: stores are paused, loads go on: %s. They resume once that has passed.",
                self._path,
                reason,
            )
            self._length = FIRST_PAUSE
        self.reason = reason
        self._until = self._clock() + self._length
        self._length = min(2 * self._length, LONGEST_PAUSE)

    def end(self) -> None:
        """A store worked. One that another thread had begun before the failure, or that found
        room which others do not, ends no pause."""
        if self.reason is not None and not self.active:
            logger.info("%s: stores resume", self._path)
            self.reason = None

    @property
    def active(self) -> bool:
        """Whether to send nothing; False once it is time for the next try."""
        return self.reason is not None and self._clock() < self._until
