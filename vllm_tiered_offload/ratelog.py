# SPDX-License-Identifier: Apache-2.0
"""Log lines that a broken disk repeats a thousand times a second, written once a minute."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Topic:
    next_time: float
    suppressed: int = 0


class RateLimitedLog:
    """At most one line per topic and interval; the next line says how many were left out.

    A topic is what the reader would call one fault, e.g. ("load", "EIO"): a different fault
    is never hidden by a noisy one. Topics are a small fixed set, never keys or paths of chunks.

    Args:
        logger: where lines go.
        interval: seconds between two lines of one topic.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        logger: logging.Logger,
        interval: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._topics: dict[object, _Topic] = {}

    def log(self, topic: object, level: int, message: str, *args: Any) -> bool:
        """Write `message % args` unless the topic's last line is too fresh.

        Returns:
            Whether the line was written.
        """
        now = self._clock()
        state = self._topics.get(topic)
        if state is None:
            state = self._topics[topic] = _Topic(next_time=now)
        if now < state.next_time:
            state.suppressed += 1
            return False
        if state.suppressed:
            message += f" ({state.suppressed} similar lines suppressed)"
        state.suppressed = 0
        state.next_time = now + self._interval
        self._logger.log(level, message, *args)
        return True

    def warning(self, topic: object, message: str, *args: Any) -> bool:
        return self.log(topic, logging.WARNING, message, *args)

    def info(self, topic: object, message: str, *args: Any) -> bool:
        return self.log(topic, logging.INFO, message, *args)
