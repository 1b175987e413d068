# SPDX-License-Identifier: Apache-2.0
"""`verify`: every checksum of a root, at a pace that leaves the disk to the engines."""

from __future__ import annotations

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

from vllm_tiered_offload.cli.output import (
    WRONG,
    JsonOption,
    console,
    error_console,
    human_bytes,
    print_json,
    reports_errors,
    size_option,
)
from vllm_tiered_offload.cli.removal import print_removed, removed_as_json
from vllm_tiered_offload.cli.roots import RootsArgument
from vllm_tiered_offload.store.inspection import RootFacts, look_at
from vllm_tiered_offload.store.maintenance import (
    Damage,
    Pace,
    Removed,
    Verifier,
    remove_segments,
)


@reports_errors
def verify(
    *,
    roots: RootsArgument,
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
    reports = []
    for root in roots:
        facts = look_at(root)
        damages, chunks = _verify(facts, pace)
        removed = None
        if repair and damages:
            removed = remove_segments(facts.root, [found.segment for found in damages])
        reports.append((facts, damages, chunks, removed))
    if as_json:
        print_json([_as_json(*report) for report in reports])
    else:
        for report in reports:
            _print(console(), *report)
    if any(damages for _, damages, _, _ in reports):
        raise typer.Exit(WRONG)


def _verify(facts: RootFacts, pace: Pace) -> tuple[list[Damage], int]:
    """What is damaged, and how many chunks were read."""
    total = sum(
        segment.chunks * segment.header.chunk_bytes
        for segment in facts.segments
        if segment.header
    )
    chunks = 0
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=error_console(),
        transient=True,
    ) as progress:
        task = progress.add_task(facts.root.path, total=total)

        def on_chunks(count: int, size: int) -> None:
            nonlocal chunks
            chunks += count
            progress.advance(task, size)

        damages = list(Verifier(facts.root, pace, on_chunks).verify(facts.segments))
    return damages, chunks


def _print(
    out: Console, facts: RootFacts, damages: list[Damage], chunks: int, removed: Removed | None
) -> None:
    size = human_bytes(facts.allocated_bytes)
    if not damages:
        out.print(f"{escape(facts.root.path)}: [green]{chunks:,} chunks good[/], {size}")
        return
    bad = sum(len(found.keys) for found in damages)
    out.print(
        f"{escape(facts.root.path)}: [red]{len(damages)} segment(s) damaged[/], {bad} of "
        f"{chunks:,} chunks bad, {size}"
    )
    for found in damages:
        out.print(f"  {escape(found.segment.path)}: {escape(found.problem)}")
    if removed is not None:
        print_removed(out, facts, removed)
    else:
        out.print("  engines treat bad chunks as misses; --repair drops these segments")


def _as_json(
    facts: RootFacts, damages: list[Damage], chunks: int, removed: Removed | None
) -> dict[str, Any]:
    return {
        "root": facts.root.path,
        "chunks": chunks,
        "damaged": [
            {
                "path": found.segment.path,
                "problem": found.problem,
                "keys": [key.hex() for key in found.keys],
            }
            for found in damages
        ],
        "repaired": removed_as_json(facts, removed) if removed is not None else None,
    }
