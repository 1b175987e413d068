# SPDX-License-Identifier: Apache-2.0
"""Removing chosen segments, or saying what would be removed; shared by prune and clear."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vllm_tiered_offload.cli.output import WRONG, console, human_bytes, print_json
from vllm_tiered_offload.cli.roots import segment_as_json
from vllm_tiered_offload.store import maintenance as care
from vllm_tiered_offload.store.inspection import RootFacts, SegmentFacts, look_at
from vllm_tiered_offload.store.maintenance import Removed

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would be removed.")
]
Chosen = Sequence[tuple[RootFacts, Sequence[SegmentFacts]]]


def tell(chosen: Chosen, as_json: bool) -> None:
    """What `remove` would do."""
    if as_json:
        print_json(
            [
                {
                    "root": facts.root.path,
                    "would_remove": [segment_as_json(segment) for segment in segments],
                }
                for facts, segments in chosen
            ]
        )
        return
    for facts, segments in chosen:
        size = sum(segment.allocated_bytes for segment in segments)
        console().print(
            f"{escape(facts.root.path)}: would remove {len(segments)} of "
            f"{len(facts.segments)} segments, {human_bytes(size)}"
        )


def remove(chosen: Chosen, as_json: bool) -> None:
    """Removes and reports. Exit code 1 if the file system refused something."""
    outcomes = []
    for facts, segments in chosen:
        outcomes.append((facts, care.remove_segments(facts.root, segments)))
        left = look_at(Path(facts.root.path))
        care.remove_manifests(facts.root, care.forgettable(left, time.time()))
    if as_json:
        print_json([removed_as_json(facts, removed) for facts, removed in outcomes])
    else:
        for facts, removed in outcomes:
            print_removed(console(), facts, removed)
    if any(removed.refused for _, removed in outcomes):
        raise typer.Exit(WRONG)


def print_removed(out: Console, facts: RootFacts, removed: Removed) -> None:
    """What was removed, and what was not and why."""
    out.print(
        f"{escape(facts.root.path)}: removed {len(removed.segments)} of {len(facts.segments)} "
        f"segments, {human_bytes(removed.allocated_bytes)}"
    )
    writing = sum(segment.state == "writing" for segment in facts.segments)
    if writing or removed.busy:
        out.print(f"  [yellow]left {writing + len(removed.busy)} that a running engine uses[/]")
    for segment in removed.refused:
        out.print(
            f"  [red]cannot remove {escape(segment.path)}[/]; look at its owner and attributes"
        )


def removed_as_json(facts: RootFacts, removed: Removed) -> dict[str, Any]:
    return {
        "root": facts.root.path,
        "removed": [segment_as_json(segment) for segment in removed.segments],
        "removed_bytes": removed.allocated_bytes,
        "busy": [segment_as_json(segment) for segment in removed.busy],
        "refused": [segment_as_json(segment) for segment in removed.refused],
    }
