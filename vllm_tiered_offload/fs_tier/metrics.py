# SPDX-License-Identifier: Apache-2.0
"""The tier's Prometheus series, from the store's cumulative statistics.

Every series carries `tier` ("1:odirect_fs", as in vLLM's own tiering metrics); those of one
directory carry `root` too. vLLM adds counters up over steps and keeps the last value of a
gauge, so counters are reported as differences. The front end refuses what was not declared,
labels of the wrong number and numpy numbers; a labelled series exists from its first report
on, so the first one holds every series, at 0 where nothing happened.

With several API servers vLLM tells one of them at each step and Prometheus keeps a gauge's
last value of each (label `pid`): counters add up, of a gauge take the maximum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from vllm_tiered_offload.reports import Increases

if TYPE_CHECKING:
    from vllm_tiered_offload.store import RootStats, StoreStats

logger = init_logger("vllm.tiered_offload.fs_tier")

PREFIX = "vllm:kv_offload_odirect_"

# suffix -> (what it is, how to read it from a root)
_ROOT_GAUGES: dict[str, tuple[str, Callable[[RootStats], int | float]]] = {
    "resident_bytes": (
        "Bytes of segments on disk in this root, whoever wrote them.",
        lambda root: root.resident_bytes,
    ),
    "resident_chunks": (
        "KV chunks in this root that this engine can read.",
        lambda root: root.chunks,
    ),
    "capacity_bytes": (
        "Bytes that segments may take in this root: the bound, or what is there and what is "
        "free where that is less.",
        lambda root: min(
            root.slots * root.segment_bytes, root.resident_bytes + root.free_bytes
        ),
    ),
    "free_bytes": ("Bytes free in the root's file system.", lambda root: root.free_bytes),
    "free_inodes": ("Inodes free in the root's file system.", lambda root: root.free_inodes),
    "oldest_operation_seconds": (
        "Age of the oldest disk operation under way, in seconds.",
        lambda root: root.oldest_seconds,
    ),
    "stalled": (
        "1 while look-ups answer MISS because an operation is older than stall_timeout.",
        lambda root: int(root.stalled),
    ),
    "stores_paused": (
        "1 while stores to this root are paused (disk full, quota, read-only mount).",
        lambda root: int(root.paused is not None),
    ),
    "recovery_seconds": (
        "Seconds the start-up scan of this root took.",
        lambda root: root.recovery_seconds,
    ),
    "recovery_chunks": (
        "KV chunks found by the start-up scan of this root.",
        lambda root: root.recovered_chunks,
    ),
}
# suffix -> (what it is, how to read it from a root's counters and the bytes of a chunk)
_ROOT_COUNTERS: dict[str, tuple[str, Callable[[Mapping[str, int], int], int]]] = {
    "read_bytes": ("Bytes read from this root.", lambda n, _: n.get("read_bytes", 0)),
    "written_bytes": (
        "Bytes written to this root: KV, records and chunks moved by eviction.",
        lambda n, _: n.get("written_bytes", 0),
    ),
    "evicted_bytes": (
        "Bytes freed by this engine's evictions.",
        lambda n, _: n.get("evicted_bytes", 0),
    ),
    "second_chance_bytes": (
        "KV bytes that were hit and therefore moved out of an evicted segment.",
        lambda n, chunk: n.get("copied_chunks", 0) * chunk,
    ),
    "expired_bytes": (
        "Bytes freed from private caches whose process is gone.",
        lambda n, _: n.get("expired_bytes", 0),
    ),
    "checksum_failures": (
        "KV chunks read from disk whose checksum did not match.",
        lambda n, _: n.get("failed.corrupt", 0),
    ),
}
_IO_ERROR = "io_errors"  # the store's counters: "io_errors.<direction>.<errno name>"
_IO_ERRORS_EXPECTED = tuple(
    (direction, name)
    for direction in ("read", "write")
    for name in ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "ESTALE", "ETIMEDOUT")
)
_TIER_COUNTERS: dict[str, tuple[str, Callable[[StoreStats], int]]] = {
    "stored_chunks": ("KV chunks written to disk.", lambda stats: stats.stored_chunks),
    "stored_bytes": ("KV bytes written to disk.", lambda stats: stats.stored_bytes),
    "loaded_chunks": ("KV chunks read from disk.", lambda stats: stats.loaded_chunks),
    "loaded_bytes": ("KV bytes read from disk.", lambda stats: stats.loaded_bytes),
}
_TIER_GAUGES: dict[str, tuple[str, Callable[[StoreStats], int | float]]] = {
    "queue_jobs": ("Jobs that wait or run.", lambda stats: stats.pending_jobs),
    "queue_bytes": (
        "KV bytes that wait to be stored.",
        lambda stats: stats.queued_store_bytes,
    ),
}
_DROPPED = "dropped_chunks"
_DROPPED_HERE = ("reset", "off")
_FAILED = "failed_chunks"
_DIRECT = "direct_io"
_PAD = "pad_bytes"
_NEVER_HIT = "stores_never_hit"

_NEVER_HIT_SECONDS = 900.0
_NEVER_HIT_CHUNKS = 1000


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Everything the tier may report, for vLLM's front end to register."""
    counter, gauge = OffloadingCounterMetadata, OffloadingGaugeMetadata
    found: dict[str, OffloadingMetricMetadata] = {}

    def add(kind: type[OffloadingMetricMetadata], name: str, text: str, *labels: str) -> None:
        found[PREFIX + name] = kind(documentation=text, labelnames=("tier", *labels))

    for name, (text, _) in _ROOT_GAUGES.items():
        add(gauge, name, text, "root")
    for name, (text, _) in _ROOT_COUNTERS.items():
        add(counter, name, text, "root")
    for name, (text, _) in _TIER_COUNTERS.items():
        add(counter, name, text)
    for name, (text, _) in _TIER_GAUGES.items():
        add(gauge, name, text)
    add(gauge, _PAD, "Bytes of this engine's chunks on disk that are padding.", "root")
    add(
        gauge,
        _DIRECT,
        "1 where I/O bypasses the page cache, as read back.",
        "root",
        "direction",
    )
    add(counter, _IO_ERROR, "Failed disk operations.", "root", "direction", "errno")
    add(counter, _DROPPED, "KV chunks left out on purpose, by reason.", "reason")
    add(counter, _FAILED, "KV chunks that were on disk but not served, by reason.", "reason")
    add(gauge, _NEVER_HIT, "1 while much was stored for long and nothing ever hit.")
    return found


class TierMetrics:
    """Turns the store's statistics into what vLLM's `get_stats` wants. One thread at a time.

    Args:
        tier: the value of the label `tier`.
        read: the store's statistics.
        chunk_bytes: bytes of a chunk, padding included.
        padding: bytes of each chunk that hold no KV.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tier: str,
        read: Callable[[], StoreStats],
        chunk_bytes: int,
        padding: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = (tier,)
        self._read = read
        self._chunk_bytes = chunk_bytes
        self._padding = padding
        self._clock = clock
        self._increases = Increases()
        self._dropped = dict.fromkeys(_DROPPED_HERE, 0)
        self._requested = 0
        self._first_store: float | None = None
        self._never_hit = False

    def store_dropped(self, reason: str, chunks: int) -> None:
        """The tier itself, not the store, left chunks out."""
        self._dropped[reason] += chunks

    def chunks_requested(self, chunks: int) -> None:
        """vLLM asked for chunks that a look-up had found."""
        self._requested += chunks

    def take(self) -> OffloadingConnectorStats:
        """Gauges as they are, counters since the last call."""
        stats = self._read()
        out = OffloadingConnectorStats()
        for root in stats.roots:
            self._add_root(out, root)
        for name, (_, count) in _TIER_COUNTERS.items():
            self._count(out, name, self._tier, count(stats))
        for name, (_, value) in _TIER_GAUGES.items():
            out.set_gauge(PREFIX + name, value(stats), self._tier)
        self._count_reasons(out, _DROPPED, stats.dropped_chunks.items())
        self._count_reasons(out, _DROPPED, self._dropped.items())
        self._count_reasons(out, _FAILED, stats.failed_chunks.items())
        self._note_never_hit(stats)
        out.set_gauge(PREFIX + _NEVER_HIT, int(self._never_hit), self._tier)
        return out

    def _note_never_hit(self, stats: StoreStats) -> None:
        before, self._never_hit = self._never_hit, self._is_never_hit(stats)
        if self._never_hit and not before:
            logger.warning(
                "%s: %d chunks stored in the last %.0f minutes or more and none ever found "
                "again: either no prompt repeats, or keys differ between runs (hash seed, "
                "cache_salt)",
                self._tier[0],
                stats.stored_chunks,
                _NEVER_HIT_SECONDS / 60,
            )

    def _is_never_hit(self, stats: StoreStats) -> bool:
        """Whether the cache costs and gives nothing: much stored for long, no hit yet."""
        if self._requested or stats.stored_chunks < _NEVER_HIT_CHUNKS:
            return False
        if self._first_store is None:
            self._first_store = self._clock()
        return self._clock() - self._first_store >= _NEVER_HIT_SECONDS

    def _add_root(self, out: OffloadingConnectorStats, root: RootStats) -> None:
        labels = (*self._tier, root.path)
        for name, (_, value) in _ROOT_GAUGES.items():
            out.set_gauge(PREFIX + name, value(root), labels)
        out.set_gauge(PREFIX + _PAD, root.chunks * self._padding, labels)
        out.set_gauge(PREFIX + _DIRECT, int(root.direct_read), (*labels, "read"))
        out.set_gauge(PREFIX + _DIRECT, int(root.direct_write), (*labels, "write"))
        for name, (_, total) in _ROOT_COUNTERS.items():
            self._count(out, name, labels, total(root.counters, self._chunk_bytes))
        self._count_io_errors(out, labels, root.counters)

    def _count_io_errors(
        self,
        out: OffloadingConnectorStats,
        labels: tuple[str, ...],
        counters: Mapping[str, int],
    ) -> None:
        if not self._increases.has(PREFIX + _IO_ERROR, (*labels, *_IO_ERRORS_EXPECTED[0])):
            for pair in _IO_ERRORS_EXPECTED:
                self._count(out, _IO_ERROR, (*labels, *pair), 0)
        for name, value in counters.items():
            if name.startswith(_IO_ERROR):
                _, direction, errno_name = name.split(".")
                self._count(out, _IO_ERROR, (*labels, direction, errno_name), value)

    def _count_reasons(
        self, out: OffloadingConnectorStats, name: str, values: Iterable[tuple[str, int]]
    ) -> None:
        for reason, value in values:
            self._count(out, name, (*self._tier, reason), value)

    def _count(
        self, out: OffloadingConnectorStats, name: str, labels: tuple[str, ...], total: int
    ) -> None:
        self._increases.report(out, PREFIX + name, total, labels)
