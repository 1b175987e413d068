# SPDX-License-Identifier: Apache-2.0
"""`verify`: every checksum of a root, at a pace that leaves the disk to the engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from vllm_tiered_offload.cli._roots import DirsArgument, RootDirOption, given_roots
from vllm_tiered_offload.cli.each import finish, on_each, print_json_list
from vllm_tiered_offload.cli.output import (
    JsonOption,
    console,
    error_console,
    human_bytes,
    reports_errors,
    size_option,
)
from vllm_tiered_offload.cli.removal import print_removed, removed_as_json
from vllm_tiered_offload.store.inspection import RootFacts, look_at
from vllm_tiered_offload.store.maintenance import (
    Damage,
    Pace,
    Removed,
    Verifier,
    remove_segments,
)


@dataclass(frozen=True, slots=True)
class Report:
    """A root that was read; `removed` is None unless something was to be repaired."""

    facts: RootFacts
    damages: list[Damage]
    chunks: int
    removed: Removed | None = None


@reports_errors
def verify(
    dirs: DirsArgument = None,
    *,
    root_dir: RootDirOption = None,
    rate: Annotated[
        str, typer.Option(help="Bytes per second at most; 0: as fast as it goes.")
    ] = "200MB",
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop segments with damage; they become misses.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every chunk and compare its checksum. Exit code 1 if anything is damaged."""
    pace = Pace(size_option(rate, "--rate") or 0)

    def work(root: Path) -> Report:
        report = _verify(look_at(root), pace)
        if repair and report.damages:
            damaged = [found.segment for found in report.damages]
            report = replace(report, removed=remove_segments(report.facts.root, damaged))
        if not as_json:
            _print(console(), report)
        return report

    reports, failures = on_each(given_roots(dirs, root_dir), work)
    if as_json:
        print_json_list(map(_as_json, reports), failures)
    finish(failures, wrong=any(report.damages for report in reports))


def _verify(facts: RootFacts, pace: Pace) -> Report:
    total = sum(
        segment.chunks * segment.header.chunk_bytes
        for segment in facts.segments
        if segment.header
    )
    chunks = 0
    notes = error_console()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    ) as progress:
        task = progress.add_task(facts.root.path, total=total)

        def on_chunks(count: int, size: int) -> None:
            nonlocal chunks
            chunks += count
            progress.advance(task, size)

        damages = list(Verifier(facts.root, pace, on_chunks).verify(facts.segments))
    return Report(facts, damages, chunks)


def _print(out: Console, report: Report) -> None:
    facts, damages = report.facts, report.damages
    size = human_bytes(facts.allocated_bytes)
    if not damages:
        out.print(f"{escape(facts.root.path)}: [green]{report.chunks:,} chunks good[/], {size}")
        return
    bad = sum(len(found.keys) for found in damages)
    out.print(
        f"{escape(facts.root.path)}: [red]{len(damages)} segment(s) damaged[/], {bad} of "
        f"{report.chunks:,} chunks bad, {size}"
    )
    for found in damages:
        out.print(f"  {escape(found.segment.path)}: {escape(found.problem)}")
    if report.removed is not None:
        print_removed(out, facts, report.removed)
    else:
        out.print("  engines treat bad chunks as misses; --repair drops these segments")


def _as_json(report: Report) -> dict[str, Any]:
    removed = report.removed
    return {
        "root": report.facts.root.path,
        "chunks": report.chunks,
        "damaged": [
            {
                "path": found.segment.path,
                "problem": found.problem,
                "keys": [key.hex() for key in found.keys],
            }
            for found in report.damages
        ],
        "repaired": removed_as_json(report.facts, removed) if removed is not None else None,
    }
