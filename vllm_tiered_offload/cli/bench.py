# SPDX-License-Identifier: Apache-2.0
"""`bench`: what the store reaches on a disk, and what fio reaches beside it."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_tiered_offload.cli._roots import DirsArgument, RootDirOption, given_roots
from vllm_tiered_offload.cli.benching.fio import has_fio, measure_fio
from vllm_tiered_offload.cli.benching.measure import WHO, BenchError, Measure, measure_store
from vllm_tiered_offload.cli.benching.plot import plot, require_matplotlib
from vllm_tiered_offload.cli.output import (
    JsonOption,
    console,
    error_console,
    human_bytes,
    print_json,
    reports_errors,
    size_option,
    table,
)
from vllm_tiered_offload.store.syscalls import Syscalls

# What a round of one contestant needs: for each byte it moves, and once.
_ROOM, _SPARE = 1.25, 512 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """What is the same in every round; `moved` is bytes each way."""

    moved: int
    read_threads: int
    direct_io: str
    with_fio: bool


@reports_errors
def bench(
    dirs: DirsArgument = None,
    *,
    root_dir: RootDirOption = None,
    chunk: Annotated[
        list[str] | None, typer.Option(help="Bytes of a chunk; may be repeated.")
    ] = None,
    total: Annotated[str, typer.Option(help="Bytes to store and load a round.")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=1, help="Medians are taken over these.")] = 3,
    read_threads: Annotated[int, typer.Option(min=1, max=64, help="n_read_threads")] = 4,
    direct_io: Annotated[str, typer.Option(help="auto, on or off")] = "auto",
    fio: Annotated[bool, typer.Option(help="Measure fio too, where it is installed.")] = True,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write a chart to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the store on a disk, with fio beside it. Files are removed again."""
    sizes = [
        size_option(text, "--chunk") or 0 for text in chunk or ("128KiB", "512KiB", "2MiB")
    ]
    moved = size_option(total, "--total") or 0
    place, *others = given_roots(dirs, root_dir)
    if others:
        raise ValueError(f"one directory is measured at a time; given: {place}, {others[0]}")
    if plot_file is not None:
        require_matplotlib()
    _check(place, sizes, moved)
    notes = error_console()
    run = Run(moved, read_threads, direct_io, fio and has_fio())
    if fio and not run.with_fio:
        notes.print("fio is not installed: the store is measured alone", style="yellow")
    found: list[Measure] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=place) as scratch:
        for size in sizes:
            for number in range(rounds):
                notes.print(f"{human_bytes(size)}, round {number + 1} of {rounds}", style="dim")
                found += _round(Path(scratch), size, run)
    medians = list(_medians(found))
    if plot_file is not None:
        plot(medians, f"{place}, {human_bytes(moved)} each way", plot_file)
    if as_json:
        print_json([asdict(measure) for measure in medians])
    else:
        _print(console(), medians)


def _check(place: Path, sizes: list[int], moved: int) -> None:
    if not place.is_dir():
        raise BenchError(f"{place} is not a directory; make it first")
    if min(sizes) < 4096:
        raise ValueError("--chunk: the smallest chunk is 4KiB")
    if moved < max(sizes):
        raise ValueError(f"--total: {moved} is below one chunk")
    free = Syscalls().free_bytes(str(place))
    needed = moved * _ROOM + _SPARE
    if free < needed:
        raise BenchError(
            f"{place}: {human_bytes(free)} free, {human_bytes(needed)} needed; "
            "give a smaller --total"
        )


def _round(scratch: Path, size: int, run: Run) -> Iterator[Measure]:
    """One after the other in each round, so that a disk that slows down slows both."""
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        own = list(
            measure_store(
                Path(place) / "root",
                size,
                run.moved,
                read_threads=run.read_threads,
                direct_io=run.direct_io,
            )
        )
    yield from own
    if run.with_fio:
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            yield from measure_fio(Path(place), size, run.moved, direct=own[0].direct_io)


def _medians(measures: Iterable[Measure]) -> Iterator[Measure]:
    rounds: dict[tuple[int, str, str], list[Measure]] = defaultdict(list)
    for measure in measures:
        rounds[measure.chunk_bytes, measure.direction, measure.who].append(measure)
    for same in rounds.values():
        yield replace(
            same[0],
            gb_per_second=statistics.median(m.gb_per_second for m in same),
            cpu_per_gb=statistics.median(m.cpu_per_gb for m in same),
        )


def _print(out: Console, measures: list[Measure]) -> None:
    fio = {(m.chunk_bytes, m.direction): m.gb_per_second for m in measures if m.who == "fio"}
    columns = ["", ">chunk", ">GB/s", ">CPU s/GB", "I/O"]
    rows = table([*columns, ">fio GB/s", ">of fio"] if fio else columns)
    for measure in (m for m in measures if m.who == WHO):
        beside = fio.get((measure.chunk_bytes, measure.direction))
        more = [f"{beside:.2f}", f"{measure.gb_per_second / beside:.0%}"] if beside else []
        rows.add_row(
            measure.direction,
            human_bytes(measure.chunk_bytes),
            f"{measure.gb_per_second:.2f}",
            f"{measure.cpu_per_gb:.3f}",
            "direct" if measure.direct_io else "[yellow]buffered[/]",
            *more,
        )
    out.print(rows)
