# SPDX-License-Identifier: Apache-2.0
"""A process's place in the hand-over, whichever way the region is handed over."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from vllm_tiered_offload.region.claim import Claim
from vllm_tiered_offload.region.roster import name_ranks

logger = logging.getLogger("vllm.tiered_offload.region")

LOG_INTERVAL = 10.0  # seconds between two lines that say who is awaited


class CreatorDied(Exception):
    """The process that made the region died before all had joined: choose a new one."""


@dataclass(frozen=True, slots=True)
class Joining:
    """Who wants the region, and what it expects.

    Args:
        rank: the worker's rank, None for the scheduler.
        length: bytes of the memory, whole pages of the backing.
        huge_bytes: size of the reserved huge pages behind it, 0 for none.
        timeout: seconds to wait for the others.
    """

    claim: Claim
    rank: int | None
    facts: dict[str, object]
    scheduler_joins: bool
    length: int
    huge_bytes: int
    timeout: float
    clock: Callable[[], float] = time.monotonic

    @property
    def who(self) -> str:
        return "the scheduler" if self.rank is None else f"rank {self.rank}"


class Seat(ABC):
    """What `take_seat` of a hand-over returns."""

    backing: str
    created: bool = False

    @property
    @abstractmethod
    def ranks(self) -> dict[int, dict[str, object]]:
        """Facts of the ranks known to have joined; a worker may know only the ranks."""

    @abstractmethod
    def fileno(self) -> int:
        """Descriptor of the memory, to map."""

    @abstractmethod
    def mapped(self) -> None:
        """Tell the others that this process has the region mapped."""

    @abstractmethod
    def wait_for_all(self, deadline: float) -> bool:
        """Wait until all ranks have mapped the region; False at `deadline` on the clock.

        Raises `CreatorDied`, or `RegionError` when the maker gave up.
        """

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Leave; idempotent. `reason` tells the waiting what went wrong."""


class Awaited:
    """Says in the log, every now and then, who is awaited."""

    def __init__(self, engine_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine_id = engine_id
        self._clock = clock
        self._start = clock()
        self._next = self._start + LOG_INTERVAL

    def tell(self, missing: list[int]) -> None:
        now = self._clock()
        if missing and now >= self._next:
            self._next = now + LOG_INTERVAL
            logger.info(
                "Region of engine %s: waiting for %s (%.0f s so far)",
                self._engine_id,
                name_ranks(missing),
                now - self._start,
            )
