# SPDX-License-Identifier: Apache-2.0
"""From two looks at the metrics to rates: what `top` shows, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm_tiered_offload.cli.monitoring.scrape import Sample

TIER = "vllm:kv_offload_odirect_"
_TIERING = "vllm:kv_offload_tiering_"


@dataclass(frozen=True, slots=True)
class Lookups:
    """Look-ups in one place. Rates are None where nothing was looked for."""

    place: str
    unit: str
    queries_per_second: float
    hit_rate: float | None  # between the two looks
    hit_rate_since_start: float | None


@dataclass(frozen=True, slots=True)
class RootView:
    """One directory; bytes, and bytes per second between the two looks."""

    path: str
    resident_bytes: float
    capacity_bytes: float
    chunks: float
    free_bytes: float
    read_per_second: float
    written_per_second: float
    evicted_per_second: float
    oldest_seconds: float
    direct_read: bool
    direct_write: bool
    paused: bool
    stalled: bool
    checksum_failures: float
    io_errors: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything `top` shows; rates are bytes per second."""

    model: str
    seconds: float
    lookups: tuple[Lookups, ...]
    roots: tuple[RootView, ...]
    load_per_second: float
    store_per_second: float
    pool_pinned: float
    queue_jobs: float
    queue_bytes: float
    dropped: dict[str, float]
    failed: dict[str, float]
    promotion_failures: float
    never_hit: bool

    @property
    def has_tier(self) -> bool:
        return bool(self.roots)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Between:
    """Two samples. A counter that fell was started anew with its engine: it counts from 0."""

    def __init__(self, before: Sample, now: Sample) -> None:
        self.now = now
        self.seconds = now.at - before.at
        self._before = before

    def rate(self, name: str, **labels: str) -> float:
        """Growth a second; 0 for two looks at one moment."""
        return self.growth(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def growth(self, name: str, **labels: str) -> float:
        new, old = (s.total(name, **labels) for s in (self.now, self._before))
        return new - old if new >= old else new


def summarize(before: Sample, now: Sample) -> Summary:
    """What happened between two looks."""
    between = Between(before, now)
    models = now.values("vllm:prefix_cache_queries_total", "model_name")
    return Summary(
        model=", ".join(models),
        seconds=between.seconds,
        lookups=tuple(_lookups(between)),
        roots=tuple(
            _root(between, path) for path in now.values(f"{TIER}resident_bytes", "root")
        ),
        load_per_second=between.rate("vllm:kv_offload_load_bytes_total"),
        store_per_second=between.rate("vllm:kv_offload_store_bytes_total"),
        pool_pinned=now.total("vllm:kv_offload_cpu_cache_usage_perc"),
        queue_jobs=now.total(f"{TIER}queue_jobs"),
        queue_bytes=now.total(f"{TIER}queue_bytes"),
        dropped=_nonzero(now.by(f"{TIER}dropped_chunks_total", "reason")),
        failed=_nonzero(now.by(f"{TIER}failed_chunks_total", "reason")),
        promotion_failures=now.total(f"{_TIERING}promotion_allocation_failures_total"),
        never_hit=now.total(f"{TIER}stores_never_hit") > 0,
    )


def _nonzero(sums: dict[str, float]) -> dict[str, float]:
    return {reason: value for reason, value in sums.items() if value}


def _lookups(between: Between) -> list[Lookups]:
    found = [
        _lookup(between, "GPU prefix cache", "tokens", "vllm:prefix_cache"),
        _lookup(between, "offloaded", "tokens", "vllm:external_prefix_cache"),
    ]
    for tier in between.now.values(f"{_TIERING}chunk_queries_total", "tier"):
        found.append(_lookup(between, tier, "chunks", f"{_TIERING}chunk", tier=tier))
    return found


def _lookup(between: Between, place: str, unit: str, prefix: str, **labels: str) -> Lookups:
    queries, hits = f"{prefix}_queries_total", f"{prefix}_hits_total"
    return Lookups(
        place,
        unit,
        between.rate(queries, **labels),
        _share(between.growth(hits, **labels), between.growth(queries, **labels)),
        _share(between.now.total(hits, **labels), between.now.total(queries, **labels)),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _root(between: Between, path: str) -> RootView:
    now = between.now

    def gauge(name: str, **labels: str) -> float:
        return now.total(TIER + name, root=path, **labels)

    def rate(name: str) -> float:
        return between.rate(f"{TIER}{name}_total", root=path)

    return RootView(
        path=path,
        resident_bytes=gauge("resident_bytes"),
        capacity_bytes=gauge("capacity_bytes"),
        chunks=gauge("resident_chunks"),
        free_bytes=gauge("free_bytes"),
        read_per_second=rate("read_bytes"),
        written_per_second=rate("written_bytes"),
        evicted_per_second=rate("evicted_bytes"),
        oldest_seconds=gauge("oldest_operation_seconds"),
        direct_read=gauge("direct_io", direction="read") > 0,
        direct_write=gauge("direct_io", direction="write") > 0,
        paused=gauge("stores_paused") > 0,
        stalled=gauge("stalled") > 0,
        checksum_failures=gauge("checksum_failures_total"),
        io_errors=gauge("io_errors_total"),
    )
