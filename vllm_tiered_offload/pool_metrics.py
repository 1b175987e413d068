# SPDX-License-Identifier: Apache-2.0
"""The Prometheus series of the pool: what promotions hold of it, and who waits for it.

Declared by our tiering spec and reported by its manager, once an engine step, whatever tiers
there are; a pool belongs to no tier, so nothing here carries the label `tier`. vLLM's own
specs have vLLM's manager, which neither pins nor waits, and none of these series.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from vllm_tiered_offload.pins import PinBook
from vllm_tiered_offload.reports import Increases
from vllm_tiered_offload.waits import OUTCOMES

PREFIX = "vllm:kv_offload_pool_"

# name -> (what it is, how to read it from the book, given the bytes of a chunk)
_GAUGES: dict[str, tuple[str, Callable[[PinBook, int], int]]] = {
    f"{PREFIX}pinned_chunks": (
        "KV chunks of the CPU pool that are held for requests which have not started yet.",
        lambda book, _: book.pinned,
    ),
    f"{PREFIX}pinned_bytes": (
        "Bytes of the CPU pool that are held for requests which have not started yet.",
        lambda book, chunk: book.pinned * chunk,
    ),
    f"{PREFIX}promoting_bytes": (
        "Bytes of the CPU pool that are being filled from the tiers.",
        lambda book, chunk: book.flying * chunk,
    ),
    f"{PREFIX}overdue_bytes": (
        "Of those, bytes whose read takes longer than pin_deadline; nobody waits for them.",
        lambda book, chunk: len(book.stuck) * chunk,
    ),
    f"{PREFIX}waiting_requests": (
        "Requests that wait for room in the CPU pool instead of computing what a tier has.",
        lambda book, _: len(book.waits),
    ),
}
_LIMIT = f"{PREFIX}promotion_limit_bytes"
_WAITS = f"{PREFIX}waits"
_WAIT_SECONDS = f"{PREFIX}wait_seconds"
_EXPIRED = f"{PREFIX}pins_expired"


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Everything the pool may report, for vLLM's front end to register."""
    counter, gauge = OffloadingCounterMetadata, OffloadingGaugeMetadata
    found: dict[str, OffloadingMetricMetadata] = {
        name: gauge(documentation=text) for name, (text, _) in _GAUGES.items()
    }
    found[_LIMIT] = gauge(
        documentation="Bytes that pins and promotions may hold of the CPU pool together."
    )
    found[_WAITS] = counter(
        documentation="Waits for room in the CPU pool that have ended, by outcome.",
        labelnames=("outcome",),
    )
    found[_WAIT_SECONDS] = counter(
        documentation="Seconds of those waits, by outcome.", labelnames=("outcome",)
    )
    found[_EXPIRED] = counter(
        documentation="Requests that lost their pins to pin_deadline before they started."
    )
    return found


class PoolMetrics:
    """Reports a `PinBook`. One thread at a time.

    Args:
        book: who holds what and who waits.
        chunk_bytes: bytes of a row of the pool, padding included.
        limit: chunks that pins and promotions may hold together.
    """

    def __init__(self, book: PinBook, chunk_bytes: int, limit: int) -> None:
        self._book = book
        self._chunk_bytes = chunk_bytes
        self._limit_bytes = limit * chunk_bytes
        self._increases = Increases()
        self._reported_events = -1

    def add_to(self, out: OffloadingConnectorStats) -> None:
        """Gauges as they are, counters since the last call."""
        book = self._book
        for name, (_, value) in _GAUGES.items():
            out.set_gauge(name, value(book, self._chunk_bytes))
        out.set_gauge(_LIMIT, self._limit_bytes)
        events = book.waits.count + book.expired_requests
        if events != self._reported_events:  # seldom, and this runs at every step
            self._reported_events = events
            self._add_counters(out)

    def _add_counters(self, out: OffloadingConnectorStats) -> None:
        book, report = self._book, self._increases.report
        for outcome in OUTCOMES:
            report(out, _WAITS, book.waits.ended[outcome], (outcome,))
            report(out, _WAIT_SECONDS, book.waits.seconds[outcome], (outcome,))
        report(out, _EXPIRED, book.expired_requests)
