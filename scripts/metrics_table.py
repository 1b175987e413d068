# SPDX-License-Identifier: Apache-2.0
"""The tables of metrics for docs/metrics.md, generated from the definitions in the code.

python scripts/metrics_table.py            print the tables
python scripts/metrics_table.py --write    put them between the markers in docs/metrics.md
python scripts/metrics_table.py --check    exit 1 if docs/metrics.md has others

Needs vLLM, which the definitions are made of. What to do when a metric moves is written here;
a metric without a line here, or a line without a metric, is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

sys.path.insert(0, str(Path(__file__).parent))
import _page

from vllm_tiered_offload import pool_metrics
from vllm_tiered_offload.fs_tier import metrics as tier_metrics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
BEGIN = "<!-- metrics-table:begin (scripts/metrics_table.py --write) -->"
END = "<!-- metrics-table:end -->"

# suffix -> (unit, what to do when it moves)
POOL = {
    "pinned_chunks": ("chunks", "As `pinned_bytes`."),
    "pinned_bytes": (
        "bytes",
        "Near `promotion_limit_bytes` for long: prompts that come back need more of the pool "
        "than there is. Raise `cpu_bytes_to_use`.",
    ),
    "promoting_bytes": ("bytes", "High and steady: the disk is the bottleneck."),
    "overdue_bytes": (
        "bytes",
        "Above 0: a tier does not answer. The rows come back when its reads end.",
    ),
    "waiting_requests": (
        "requests",
        "Above 0 now and then is normal. Always: the pool is too small for the load.",
    ),
    "promotion_limit_bytes": (
        "bytes",
        "Fixed at start by `cpu_bytes_to_use`, `pin_share` and `store_headroom`.",
    ),
    "waits": (
        "waits",
        "Outcomes: `in_time` (there was room, or others brought the chunks), "
        "`out_of_patience` (took what there was, computed the rest), `gone` (aborted, reset). "
        "Many `out_of_patience`: raise `cpu_bytes_to_use`, or lower `patience` so that nobody "
        "waits in vain.",
    ),
    "wait_seconds": (
        "seconds",
        "Divided by `waits`: how long a wait takes; it is part of the time to first token.",
    ),
    "pins_expired": (
        "requests",
        "Grows: requests wait longer for the GPU than `pin_deadline`, and what was read for "
        "them may be read again. Raise it, or admit fewer requests.",
    ),
}
TIER = {
    "resident_bytes": ("bytes", "At `capacity_bytes`: full, eviction has begun."),
    "resident_chunks": (
        "chunks",
        "Well below what `resident_bytes` holds: the rest belongs to other models or versions.",
    ),
    "capacity_bytes": (
        "bytes",
        "Falls: others fill the file system, or the root's directories.",
    ),
    "free_bytes": ("bytes", "Towards 0: something else fills the file system."),
    "free_inodes": ("inodes", "Towards 0: new segments will fail."),
    "oldest_operation_seconds": (
        "seconds",
        "Above 1: the disk is slow or hangs; at `stall_timeout` look-ups answer MISS.",
    ),
    "stalled": ("0 or 1", "1: check disk, mount and kernel log. Ends by itself."),
    "stores_paused": (
        "0 or 1",
        "1: the log says why. Ends by itself once there is room again. 0 with "
        '`"mode": "read"`, which stores nothing on purpose.',
    ),
    "recovery_seconds": ("seconds", "Set at start: what the disk added to the start."),
    "recovery_chunks": (
        "chunks",
        "0 after a restart: another namespace, see `vllm-tiered-offload ls`.",
    ),
    "read_bytes": ("bytes", "The disk's load by reads."),
    "written_bytes": ("bytes", "The disk's wear."),
    "evicted_bytes": (
        "bytes",
        "At the rate of `written_bytes`: full. `capacity_bytes` over this rate is how long a "
        "chunk stays; make it longer than users take to come back.",
    ),
    "second_chance_bytes": (
        "bytes",
        "Most of `evicted_bytes`: nearly all is hot, and a larger disk would help.",
    ),
    "expired_bytes": ("bytes", "Private caches of ended processes; no action."),
    "checksum_failures": (
        "chunks",
        "A few after a power loss; otherwise disk or memory corrupts data. Run "
        "`vllm-tiered-offload verify`.",
    ),
    "stored_chunks": ("chunks", "Flat under load: see `dropped_chunks` and `stores_paused`."),
    "stored_bytes": ("bytes", "As `stored_chunks`."),
    "loaded_chunks": ("chunks", "What the tier is there for."),
    "loaded_bytes": ("bytes", "As `loaded_chunks`."),
    "queue_jobs": ("jobs", "High and steady: the disk is the bottleneck."),
    "queue_bytes": ("bytes", "At `store_queue_bytes` chunks are dropped."),
    "pad_bytes": (
        "bytes",
        "A large part of `resident_bytes`: `blocks_per_chunk` 2 or more pads less.",
    ),
    "direct_io": (
        "0 or 1",
        "Labels `direction`: `read`, `write`. 0: through the page cache; `vllm-tiered-offload "
        "doctor` says why.",
    ),
    "io_errors": ("calls", "`EIO`: the device. `ENOSPC`, `EDQUOT`: room. Others: the mount."),
    "dropped_chunks": (
        "chunks",
        "Reasons: `queue` (the disk cannot keep up), `full`, `paused`, `stalled`, `read_mode`, "
        "`shutdown`, `error` (a write failed), `reset` (computed before a reset), `off` (no "
        "namespace after a reset).",
    ),
    "failed_chunks": (
        "chunks",
        "Reasons: `corrupt`, `deleted`, `io_error`, `exhausted` (the process ran out of "
        "descriptors or memory; the chunk stays), `unknown` (evicted between look-up and "
        "load). Each was computed again. Has no series until the first one.",
    ),
    "stores_never_hit": (
        "0 or 1",
        "1: no prompt repeats, or keys differ between runs (hash seed, `cache_salt`).",
    ),
}


def table(
    prefix: str,
    definitions: Mapping[str, OffloadingMetricMetadata],
    notes: Mapping[str, tuple[str, str]],
) -> Iterator[str]:
    """One family; SystemExit where definitions and notes do not name the same metrics."""
    suffixes = {name.removeprefix(prefix) for name in definitions}
    if wrong := suffixes ^ set(notes):
        sys.exit(f"scripts/metrics_table.py: not in both: {', '.join(sorted(wrong))}")
    yield "| metric | type | labels | unit | what it is | when it moves |"
    yield "|---|---|---|---|---|---|"
    for name, metadata in definitions.items():
        counter = isinstance(metadata, OffloadingCounterMetadata)
        unit, action = notes[name.removeprefix(prefix)]
        labels = ", ".join(f"`{label}`" for label in metadata.labelnames) or "-"
        cells = (
            f"`{name}{'_total' if counter else ''}`",
            "counter" if counter else "gauge",
            labels,
            unit,
            metadata.documentation,
            action,
        )
        yield f"| {' | '.join(cells)} |"


def tables() -> str:
    lines = ["### The pool", ""]
    lines += table(pool_metrics.PREFIX, pool_metrics.metric_definitions(), POOL)
    lines += ["", "### The disk tier", ""]
    lines += table(tier_metrics.PREFIX, tier_metrics.metric_definitions(), TIER)
    return "\n".join(lines)


def main() -> None:
    stale = "docs/metrics.md: the tables are stale; run scripts/metrics_table.py --write"
    _page.main(__doc__, PAGE, (BEGIN, END), tables, stale)


if __name__ == "__main__":
    main()
