# SPDX-License-Identifier: Apache-2.0
"""Replays a trace of prompts through the store's eviction policy, next to exact chunk LRU.

    python benchmarks/replay.py conversation_trace.jsonl
    python benchmarks/replay.py --synthetic 9000

The policy is the store's own; the disk is simulated (`_simulation.py`). Exit status 1 when a
bar is missed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from _common import Bar, console, print_bars, write_json
from _simulation import (
    Outcome,
    Request,
    distinct_chunks,
    make_conversations,
    read_trace,
    replay_lru,
    replay_segments,
)
from rich.table import Table

SHARES = (0.05, 0.10, 0.20, 0.40)
LEAST_HITS, MOST_WRITES = 0.97, 1.25


def main(
    trace: Annotated[Path | None, typer.Argument(exists=True, dir_okay=False)] = None,
    synthetic: Annotated[int, typer.Option(help="generate so many requests instead")] = 0,
    seed: Annotated[int, typer.Option(help="of the generated trace")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Hit ratio and writes for caches of 5, 10, 20 and 40 % of the distinct chunks."""
    if (trace is None) == (not synthetic):
        raise typer.BadParameter("give a trace file, or --synthetic REQUESTS")
    requests = read_trace(trace) if trace else make_conversations(synthetic, seed)
    distinct = distinct_chunks(requests)
    console.print(f"{len(requests)} requests, {distinct} distinct chunks")
    table = _table()
    bars: list[Bar] = []
    for share in SHARES:
        lru, ours = _replay(requests, int(distinct * share))
        hits, writes = ours.hits / lru.hits, ours.writes / lru.writes
        bars.append(Bar(f"hits at {share:.0%}, of LRU's", hits, LEAST_HITS, at_least=True))
        bars.append(Bar(f"writes at {share:.0%}, of LRU's", writes, MOST_WRITES))
        table.add_row(f"{share:.0%}", *_cells(lru, ours), f"{hits:.3f}", f"{writes:.3f}")
    console.print(table)
    passed = print_bars(bars)
    write_json(json_file, {"requests": len(requests), "distinct_chunks": distinct}, bars)
    raise typer.Exit(0 if passed else 1)


def _replay(requests: list[Request], capacity: int) -> tuple[Outcome, Outcome]:
    return replay_lru(requests, capacity), replay_segments(requests, capacity)


def _table() -> Table:
    table = Table(title="segments against exact chunk LRU, same bytes", title_justify="left")
    table.add_column("cache", justify="right")
    for column in ("hit ratio", "LRU's", "writes", "moved", "LRU's", "hits x", "writes x"):
        table.add_column(column, justify="right")
    return table


def _cells(lru: Outcome, ours: Outcome) -> tuple[str, ...]:
    ratios = f"{ours.hit_ratio:.4f}", f"{lru.hit_ratio:.4f}"
    return *ratios, str(ours.writes), str(ours.moved), str(lru.writes)


if __name__ == "__main__":
    typer.run(main)
