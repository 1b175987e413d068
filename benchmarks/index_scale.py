# SPDX-License-Identifier: Apache-2.0
"""Restart, memory, look-ups and descriptors of a store with a million chunks.

    python benchmarks/index_scale.py --chunks 1000000 --segments 500
    python benchmarks/index_scale.py --chunks 1000000 --segments 10000

The segments are sealed and sparse. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psutil
import typer
from _common import Bar, console, print_bars, write_json
from _sparse_root import CHUNK_BYTES, NAMESPACE, keys_of, make_sparse_root
from rich.table import Table

from vllm_tiered_offload.store import ChunkStore, StoreSettings

T = TypeVar("T")
LOOKUPS = 200_000
LOADS_PER_JOB = 500
USUAL_CHUNKS = 1000  # in a segment
MOST_DESCRIPTORS = 256 + 64  # the store's idle ones, and everything else


def main(
    chunks: Annotated[int, typer.Option(min=1)] = 1_000_000,
    segments: Annotated[int, typer.Option(min=1, help="as with 128 KiB chunks")] = 500,
    root: Annotated[Path, typer.Option(help="where to make the segments")] = Path(),
    rounds: Annotated[int, typer.Option(min=1, help="restarts")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-", dir=root) as scratch:
        place = Path(scratch) / "root"
        console.print(f"making {segments} segments with {chunks} chunks", style="dim")
        max_bytes = make_sparse_root(place, chunks, segments)
        where = (place, max_bytes, chunks)
        restarts = [in_fresh_process(measure, *where, segments) for _ in range(rounds)]
        traced = in_fresh_process(measure_traced, *where)
    found = {name: statistics.median(r[name] for r in restarts) for name in restarts[0]}
    found["traced_bytes_per_chunk"] = traced
    table = Table(title=f"{chunks} chunks in {segments} segments", title_justify="left")
    table.add_column("what")
    table.add_column("median", justify="right")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), f"{value:,.3f}")
    console.print(table)
    bars = [
        Bar("memory per chunk (resident)", found["resident_bytes_per_chunk"], 250, unit="B"),
        Bar("lookup, found", found["hit_us"], 1, unit="us"),
        Bar("lookup, not found", found["miss_us"], 1, unit="us"),
        Bar("descriptors", found["descriptors"], MOST_DESCRIPTORS),
    ]
    if chunks >= segments * USUAL_CHUNKS:  # else it is the files that take the time
        per_100k = found["restart_s_per_100k"]
        bars.append(Bar("restart per 100 000 chunks", per_100k, 0.1, unit="s"))
    passed = print_bars(bars)
    write_json(json_file, {"chunks": chunks, "segments": segments, **found}, bars)
    raise typer.Exit(0 if passed else 1)


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """Memory that an earlier store left behind would be used again."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def measure(root: Path, max_bytes: int, chunks: int, segments: int) -> dict[str, float]:
    """One restart in this process, and what the index costs and does afterwards."""
    logging.disable(logging.INFO)
    rows = mmap.mmap(-1, LOADS_PER_JOB * CHUNK_BYTES)
    gc.collect()
    before, began = resident_bytes(), time.perf_counter()
    store = open_store(root, max_bytes, rows)
    seconds = time.perf_counter() - began
    gc.collect()
    after = resident_bytes()
    require(store.stats().chunks == chunks, "not all chunks were recovered")
    rng = random.Random(0)
    hit_us = lookup_us(store, rng.sample(range(chunks), min(chunks, LOOKUPS)), True)
    miss_us = lookup_us(store, list(range(chunks, chunks + LOOKUPS)), False)
    descriptors = load_from_every_segment(store, chunks, segments)
    require(store.shutdown(), "a thread did not end")
    return {
        "restart_seconds": seconds,
        "restart_s_per_100k": seconds / chunks * 100_000,
        "resident_bytes_per_chunk": (after - before) / chunks,
        "hit_us": hit_us,
        "miss_us": miss_us,
        "lookups_per_second": 1e6 / hit_us,
        "descriptors": descriptors,
    }


def measure_traced(root: Path, max_bytes: int, chunks: int) -> float:
    """Bytes per chunk that Python's allocators hold after a restart."""
    logging.disable(logging.INFO)
    rows = mmap.mmap(-1, CHUNK_BYTES)
    tracemalloc.start()
    store = open_store(root, max_bytes, rows)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    store.shutdown()
    return held / chunks


def open_store(root: Path, max_bytes: int, rows: mmap.mmap) -> ChunkStore:
    settings = StoreSettings((root,), max_bytes=max_bytes)
    return ChunkStore(settings, NAMESPACE, memoryview(rows), CHUNK_BYTES)


def lookup_us(store: ChunkStore, numbers: list[int], held: bool) -> float:
    keys = keys_of(numbers)
    contains, began = store.contains, time.thread_time()
    results = [contains(key) for key in keys]
    took = time.thread_time() - began
    require(set(results) == {held}, "look-ups answered wrong")
    return took / len(keys) * 1e6


def load_from_every_segment(store: ChunkStore, chunks: int, segments: int) -> int:
    """A chunk out of each segment; the most descriptors that were open meanwhile."""
    per_segment = -(-chunks // segments)
    numbers = list(range(0, chunks, per_segment))
    most = 0
    for job, start in enumerate(range(0, len(numbers), LOADS_PER_JOB)):
        keys = keys_of(numbers[start : start + LOADS_PER_JOB])
        store.submit_load(job, keys, range(len(keys)))
        while store.pending_jobs:
            most = max(most, open_descriptors())
            time.sleep(0.001)
        require(all(done.ok for done in store.take_completions()), "a load failed")
        most = max(most, open_descriptors())
    return most


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def require(holds: bool, complaint: str) -> None:
    if not holds:
        raise SystemExit(f"index_scale: {complaint}")


if __name__ == "__main__":
    typer.run(main)
