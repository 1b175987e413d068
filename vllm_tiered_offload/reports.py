# SPDX-License-Identifier: Apache-2.0
"""Counters as vLLM's front end wants them: what came on top since the last report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )


class Increases:
    """Turns totals that only grow into increases.

    The first report of a series is made even where it is 0: a labelled series exists in
    Prometheus from then on, and a rate over it is right from the start.
    """

    def __init__(self) -> None:
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}

    def has(self, name: str, labels: tuple[str, ...]) -> bool:
        """Whether the series was reported before."""
        return (name, labels) in self._reported

    def report(
        self,
        out: OffloadingConnectorStats,
        name: str,
        total: float,
        labels: tuple[str, ...] = (),
    ) -> None:
        """Add to `out` by how much `total` has grown; nothing if it has not."""
        series = (name, labels)
        before = self._reported.get(series)
        if before is None or total > before:
            self._reported[series] = total
            out.increase_counter(name, total - (before or 0), labels)
