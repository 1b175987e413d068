# SPDX-License-Identifier: Apache-2.0
"""How long to hope that things change: an engine that is dying ends, workers arrive."""

from __future__ import annotations

from vllm_tiered_offload.region.seat import Joining, logger
from vllm_tiered_offload.region.settings import RegionError

# Seconds to hope that a dying engine of the same id ends, before giving up.
REFUSAL = 10.0
# Seconds the scheduler waits for workers; vLLM starts it when they are done.
SCHEDULER = 30.0


class Patience:
    """One process's; starts at the first setback. Every method raises when it is over."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining
        self._ends: float | None = None

    def is_over(self) -> bool:
        return self._ends is not None and self._joining.clock() >= self._ends

    def _wait(self, seconds: float, reason: str) -> None:
        if self._ends is None:
            self._ends = self._joining.clock() + min(seconds, self._joining.timeout)
            logger.info("Region: %s; trying for %.0f s", reason, seconds)
        if self.is_over():
            raise RegionError(
                f"{self._joining.who} cannot join the region of engine "
                f"{self._joining.claim.engine_id}: {reason}"
            )

    def refused(self, reason: str) -> None:
        """Another engine holds this engine's name."""
        self._wait(REFUSAL, reason)

    def duplicate(self, rank: int, pid: object) -> None:
        self.refused(duplicate(rank, pid, self._joining.claim.engine_id))

    def nobody(self) -> None:
        """The scheduler is here, but no worker."""
        self._wait(SCHEDULER, "none of its workers is on this host")

    def incomplete(self) -> None:
        """The scheduler is here, but not all workers; it takes what it gets in the end."""
        if self._ends is None:
            self._wait(SCHEDULER, "some workers are not here yet")


def duplicate(rank: int, pid: object, engine_id: str) -> str:
    return (
        f"rank {rank} has joined already, as process {pid}: two engines use "
        f"engine_id {engine_id}"
    )
