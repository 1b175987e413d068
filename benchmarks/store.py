# SPDX-License-Identifier: Apache-2.0
"""The disk tier next to fio and to vLLM's own fs tier, on one file system in one run.

    python benchmarks/store.py --chunk 2MiB --total 4GiB --root /nvme/bench

Both tiers are driven through vLLM's SecondaryTierManager interface, checksums on. Rounds are
interleaved, so that a disk that slows down slows all alike; the numbers are medians. Exit
status 1 when a bar is missed.
"""

from __future__ import annotations

import logging
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from _common import Bar, console, print_bars, write_json
from _tiers import (
    MIB,
    Rows,
    TierRun,
    Transfer,
    calibrate_spins,
    fresh_keys,
    has_fio,
    idle_slices,
    make_ours,
    make_vllm_fs,
    run_fio,
)
from rich.table import Table

from vllm_tiered_offload.config import parse_size

OURS, VLLM, FIO = "odirect_fs", "vllm-fs", "fio"
DIRECTIONS = ("store", "load")


@dataclass
class Samples:
    """What the rounds of one contestant gave, by direction or alone."""

    transfers: dict[str, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    slices: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lookups: list[float] = field(default_factory=list)

    def median(self, direction: str, name: str) -> float:
        return statistics.median(getattr(t, name) for t in self.transfers[direction])


def main(
    chunk: Annotated[str, typer.Option(help="bytes of a chunk")] = "2MiB",
    total: Annotated[str, typer.Option(help="bytes moved each way and round")] = "2GiB",
    against: Annotated[str, typer.Option(help="fio, vllm-fs, both or ''")] = "fio,vllm-fs",
    root: Annotated[Path, typer.Option(help="directory on the disk to measure")] = Path(),
    job: Annotated[str, typer.Option(help="bytes of a job")] = "64MiB",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    readers: Annotated[int, typer.Option(min=1, help="n_read_threads")] = 4,
    writers: Annotated[int, typer.Option(min=1, help="n_write_threads")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    logging.disable(logging.WARNING)
    chunk_bytes = parse_size(chunk)
    count = max(1, parse_size(total) // chunk_bytes)
    others = _available([name for name in against.split(",") if name])
    rows = Rows(count, chunk_bytes)
    per_job = max(1, parse_size(job) // chunk_bytes)
    samples = {name: Samples() for name in (OURS, *others)}
    ours = partial(make_ours, readers=readers, writers=writers)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=root) as scratch:
        for number in range(rounds):
            console.print(f"round {number + 1} of {rounds}", style="dim")
            for name, into in samples.items():
                place = Path(scratch) / name
                place.mkdir()
                if name == FIO:
                    _fio_round(into, place, chunk_bytes, count * chunk_bytes, readers, writers)
                else:
                    make = ours if name == OURS else make_vllm_fs
                    _tier_round(into, make, place, rows, per_job)
                shutil.rmtree(place)
    _print_samples(samples, count, chunk_bytes)
    bars = make_bars(samples, count, chunk_bytes)
    passed = print_bars(bars)
    write_json(json_file, _as_json(samples, count, chunk_bytes), bars)
    raise typer.Exit(0 if passed else 1)


def _available(names: list[str]) -> list[str]:
    unknown = sorted(set(names) - {VLLM, FIO})
    if unknown:
        raise typer.BadParameter(f"--against {', '.join(unknown)}: must be of fio, vllm-fs")
    if FIO in names and not has_fio():
        console.print("fio is not installed: left out, and so are the bars against it")
        names.remove(FIO)
    return names


def _fio_round(
    into: Samples, place: Path, chunk_bytes: int, total: int, readers: int, writers: int
) -> None:
    for direction, fio_name, calls in (("store", "write", writers), ("load", "read", readers)):
        into.transfers[direction].append(run_fio(place, fio_name, chunk_bytes, total, calls))


def _tier_round(
    into: Samples,
    make: Callable[[Path, Rows], Any],
    place: Path,
    rows: Rows,
    per_job: int,
) -> None:
    """Once with a main thread that sleeps, for the rates; once with a busy one."""
    for busy in (False, True):
        keys = fresh_keys(rows.count)
        jobs = [keys[at : at + per_job] for at in range(0, len(keys), per_job)]
        here = place / ("busy" if busy else "quiet")
        tier = make(here, rows)
        try:
            run = TierRun(tier, rows, jobs, busy)
            for direction, transfer in (("store", run.store), ("load", run.load)):
                measured = transfer()
                if busy:
                    into.slices[direction] += measured.slices
                else:
                    into.transfers[direction].append(measured)
            if not busy:
                into.lookups.append(run.lookup_seconds_per_key())
        finally:
            tier.shutdown()
        shutil.rmtree(here)


COLUMNS = ("", "GB/s", "ours x", "CPU s/GB", "ours x", "submit us", "lookup us", "100 us slice")


def _print_samples(samples: dict[str, Samples], count: int, chunk_bytes: int) -> None:
    size = f"{count} chunks of {chunk_bytes / MIB:g} MiB, {count * chunk_bytes / 1e9:.2f} GB"
    table = Table(title=f"{size}; medians", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("idle", *[""] * 6, _percentiles(idle_slices(calibrate_spins())))
    for direction in DIRECTIONS:
        for name in samples:
            table.add_row(f"{direction} {name}", *_cells(samples, direction, name, count))
    console.print(table)
    console.print(
        "ours x: ours divided by it. Submit is per chunk, lookup per key. Slice: p50 / p99 / "
        "max in us of 100 us of work on a busy main thread.",
        style="dim",
    )


def _cells(samples: dict[str, Samples], direction: str, name: str, count: int) -> list[str]:
    of, ours = samples[name], samples[OURS]
    rates = []
    for what, form in (("gb_per_second", ".2f"), ("cpu_per_gb", ".3f")):
        value = of.median(direction, what)
        ratio = "" if name == OURS else f"{ours.median(direction, what) / value:.2f}"
        rates += [format(value, form), ratio]
    if name == FIO:
        return [*rates, "", "", ""]
    submit = of.median(direction, "submit_seconds") / count * 1e6
    lookup = statistics.median(of.lookups) * 1e6
    return [*rates, f"{submit:.2f}", f"{lookup:.2f}", _percentiles(of.slices[direction])]


def _percentiles(slices: list[float]) -> str:
    if not slices:
        return ""
    p50, p99 = np.percentile(slices, [50, 99]) * 1e6
    return f"{p50:.0f} / {p99:.0f} / {max(slices) * 1e6:.0f}"


def make_bars(samples: dict[str, Samples], count: int, chunk_bytes: int) -> list[Bar]:
    """The bars that apply to this chunk size and to who was measured."""
    ours = samples[OURS]
    bars: list[Bar] = []
    for direction in DIRECTIONS:
        rate = ours.median(direction, "gb_per_second")
        if FIO in samples and chunk_bytes >= 512 << 10:
            theirs = samples[FIO].median(direction, "gb_per_second")
            bars.append(Bar(f"{direction}, of fio's rate", rate / theirs, 0.90, at_least=True))
        if VLLM in samples and direction == "store" and chunk_bytes <= 128 << 10:
            theirs = samples[VLLM].median(direction, "gb_per_second")
            bars.append(Bar("store, of vLLM fs's rate", rate / theirs, 2.0, at_least=True))
        cpu = ours.median(direction, "cpu_per_gb")
        most = 0.12 if chunk_bytes >= 2 * MIB else 0.20
        bars.append(Bar(f"{direction}, CPU per GB", cpu, most, unit="s"))
        submit = ours.median(direction, "submit_seconds") / count * 1e6
        bars.append(Bar(f"{direction}, submit per chunk", submit, 5, unit="us"))
        p99 = float(np.percentile(ours.slices[direction], 99)) * 1e3
        bars.append(Bar(f"{direction}, p99 of a busy 100 us slice", p99, 1, unit="ms"))
    bars.append(Bar("lookup per key", statistics.median(ours.lookups) * 1e6, 1, unit="us"))
    return bars


def _as_json(samples: dict[str, Samples], count: int, chunk_bytes: int) -> dict[str, object]:
    names = ("gb_per_second", "cpu_per_gb", "submit_seconds")
    found: dict[str, object] = {"chunk_bytes": chunk_bytes, "chunks": count}
    for who, of in samples.items():
        found[who] = {
            direction: {name: of.median(direction, name) for name in names}
            | {
                f"slice_us_p{q}": float(np.percentile(of.slices[direction], q)) * 1e6
                for q in (50, 99, 100)
                if of.slices[direction]
            }
            for direction in DIRECTIONS
        } | {"lookup_us": [seconds * 1e6 for seconds in of.lookups]}
    return found


if __name__ == "__main__":
    typer.run(main)
