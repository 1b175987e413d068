# SPDX-License-Identifier: Apache-2.0
"""The statistics of several roots as those of one store."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_tiered_offload.store.api import RootStats, StoreStats


def add_up(
    roots: tuple[RootStats, ...], own: Mapping[str, int], *, chunks: int, pending_jobs: int
) -> StoreStats:
    """``own`` are counters of what concerns no root."""
    total = dict(own)
    for root in roots:
        for name, count in root.counters.items():
            total[name] = total.get(name, 0) + count
    get = total.get
    return StoreStats(
        chunks=chunks,
        pending_jobs=pending_jobs,
        queued_store_bytes=sum(root.queued_store_bytes for root in roots),
        stalled=any(root.stalled for root in roots),
        stored_chunks=get("stored_chunks", 0),
        stored_bytes=get("stored_bytes", 0),
        loaded_chunks=get("loaded_chunks", 0),
        loaded_bytes=get("loaded_bytes", 0),
        evicted_chunks=get("evicted_chunks", 0),
        evicted_segments=get("evicted_segments", 0),
        copied_chunks=get("copied_chunks", 0),
        written_bytes=get("written_bytes", 0),
        read_bytes=get("read_bytes", 0),
        write_seconds=get("write_ns", 0) / 1e9,
        read_seconds=get("read_ns", 0) / 1e9,
        dropped_chunks=_by_reason(total, "dropped."),
        failed_chunks=_by_reason(total, "failed."),
        roots=roots,
    )


def _by_reason(total: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): count
        for name, count in total.items()
        if name.startswith(prefix)
    }
