# SPDX-License-Identifier: Apache-2.0
"""What the scheduler pays per key: vLLM's tiering manager and ours, side by side.

    python benchmarks/manager.py --chunks 4096 --rounds 9

Both managers drive the same kind of pool and a tier that answers at once, so only
the manager's own work is measured. Every phase is timed for one request of
`--chunks` keys; the table has medians over the rounds, which alternate. Exit
status 1 when a bar is missed.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from _common import Bar, console, print_bars, write_json
from rich.table import Table

logging.disable(logging.INFO)

from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    Medium,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import (  # noqa: E402
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from vllm_tiered_offload.manager import PinnedTieringManager, PinSettings  # noqa: E402

END = ScheduleEndContext((), ())
PROMOTION = (
    "look-up that promotes",
    "step: rows and submit",
    "look-up while pending",
    "step: collect and pin",
    "look-up of a hit",
    "prepare_load",
    "complete_load",
)


class InstantTier(SecondaryTierManager):
    """Holds a set of keys; every job has ended by the next poll."""

    medium = Medium.STORAGE

    def __init__(self, view: memoryview) -> None:
        super().__init__(SimpleNamespace(), view, "instant")
        self.held: set[bytes] = set()
        self.results: list[JobResult] = []

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if key in self.held else LookupResult.MISS

    def submit_store(self, job: Any) -> None:
        self.results.append(JobResult(job.job_id, True))

    submit_load = submit_store

    def get_finished_jobs(self) -> list[JobResult]:
        results, self.results = self.results, []
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        pass


class Region:
    def __init__(self, chunks: int) -> None:
        self.view = memoryview(bytearray(chunks * 64)).cast("b", (chunks, 64))

    def create_kv_memoryview(self) -> memoryview:
        return self.view

    def cleanup(self) -> None:
        pass


def make_vllm(pool: Any, tier: Any) -> Any:
    return TieringOffloadingManager(pool, [tier])


def make_ours(pool: Any, tier: Any) -> Any:
    pins = PinSettings(max_share=1.0, store_headroom=0.0)
    return PinnedTieringManager(pool, [tier], pins=pins)


class Timer:
    def __init__(self, keys: int) -> None:
        self.keys = keys
        self.microseconds: dict[str, list[float]] = defaultdict(list)

    def __call__(self, phase: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        elapsed = time.process_time() - start
        self.microseconds[phase].append(elapsed * 1e6 / self.keys)
        return result

    def medians(self) -> dict[str, float]:
        return {phase: statistics.median(v) for phase, v in self.microseconds.items()}


def new_keys(count: int) -> list[Any]:
    return [make_offload_key(os.urandom(32), 0) for _ in range(count)]


def new_request(manager: Any, name: str, keys: list[Any]) -> ReqContext:
    context = ReqContext(req_id=name)
    if hasattr(context, "set_offload_key_position"):
        for i, key in enumerate(keys, 1):
            context.set_offload_key_position(key, 16 * i)
    manager.on_new_request(context)
    return context


def one_round(make: Callable[[Any, Any], Any], chunks: int, timer: Timer) -> None:
    """A full pool of other chunks, then one prefix from the tier, then the way back."""
    pool = CPUPrimaryTierOffloadingManager(chunks, Region(chunks))
    tier = InstantTier(pool.get_kv_memoryview())
    manager = make(pool, tier)
    others, keys = new_keys(chunks), new_keys(chunks)
    tier.held.update(keys)

    request = new_request(manager, "stores", others)
    timer("look-up of a miss", lambda: [manager.lookup(key, request) for key in others])
    timer("prepare_store", lambda: manager.prepare_store(others, request))
    timer("complete_store", lambda: manager.complete_store(set(others), request))
    manager.on_request_finished(request)
    for _ in range(2):
        manager.on_schedule_end(END)

    request = new_request(manager, "loads", keys)

    def scan() -> list[LookupResult]:
        return [manager.lookup(key, request) for key in keys]

    first, submit, pending, collect, hits, prepare, complete = PROMOTION
    timer(first, scan)
    timer(submit, lambda: manager.on_schedule_end(END))
    manager._processed_jobs_this_step = True  # as if the disk had not answered yet
    timer(pending, scan)
    manager._processed_jobs_this_step = False
    timer(collect, lambda: manager.on_schedule_end(END))
    assert set(timer(hits, scan)) == {LookupResult.HIT}
    timer(prepare, lambda: manager.prepare_load(keys, request))
    timer(complete, lambda: manager.complete_load(set(keys), request))
    timer("request ends", lambda: manager.on_request_finished(request))
    manager.on_schedule_end(END)
    manager.shutdown()


def main(
    chunks: Annotated[int, typer.Option(min=64, help="keys of one prefix")] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    timers = {"vLLM": Timer(chunks), "ours": Timer(chunks)}
    for _ in range(rounds):
        one_round(make_vllm, chunks, timers["vLLM"])
        one_round(make_ours, chunks, timers["ours"])
    vllm, ours = timers["vLLM"].medians(), timers["ours"].medians()
    for phases in (vllm, ours):
        phases["one promoted key, all of it"] = sum(phases[p] for p in PROMOTION)
    table = Table(title=f"microseconds a key, {chunks} keys", title_justify="left")
    table.add_column("phase")
    for column in ("vLLM", "ours", "ratio"):
        table.add_column(column, justify="right")
    for phase, theirs in vllm.items():
        ratio = ours[phase] / theirs
        table.add_row(phase, f"{theirs:.2f}", f"{ours[phase]:.2f}", f"{ratio:.2f}")
    console.print(table)
    whole = "one promoted key, all of it"
    bars = [
        Bar("a promoted key, part of vLLM's time", ours[whole] / vllm[whole], 1.0),
        Bar(
            "promoting look-up and submit, part of vLLM's",
            sum(ours[p] for p in PROMOTION[:2]) / sum(vllm[p] for p in PROMOTION[:2]),
            0.7,
        ),
    ]
    held = print_bars(bars)
    write_json(json_file, {"microseconds": {"vllm": vllm, "ours": ours}}, bars)
    raise typer.Exit(0 if held else 1)


if __name__ == "__main__":
    typer.run(main)
