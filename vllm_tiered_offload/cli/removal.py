# SPDX-License-Identifier: Apache-2.0
"""Removing chosen segments, or saying what would be removed; shared by prune and clear."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vllm_tiered_offload.cli.each import Failure, finish, on_each, print_json_list
from vllm_tiered_offload.cli.facts import segment_as_json
from vllm_tiered_offload.cli.output import console, human_bytes
from vllm_tiered_offload.store import maintenance as care
from vllm_tiered_offload.store.inspection import RootFacts, SegmentFacts, look_at
from vllm_tiered_offload.store.maintenance import Removed

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would be removed.")
]
Criterion = Callable[[RootFacts], Sequence[SegmentFacts]]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a criterion takes of a root, and what stays because an engine is writing it."""

    facts: RootFacts
    segments: Sequence[SegmentFacts]
    in_use: Sequence[SegmentFacts]

    @property
    def root(self) -> str:
        return self.facts.root.path

    @property
    def allocated_bytes(self) -> int:
        return sum(segment.allocated_bytes for segment in self.segments)


def choose(facts: RootFacts, criterion: Criterion) -> Choice:
    """`in_use` is what the criterion takes beyond that once all writers have ended."""
    writing = {s.path: s for s in facts.segments if s.state == "writing"}
    ended = replace(facts, segments=tuple(replace(s, state="sealed") for s in facts.segments))
    in_use = [writing[s.path] for s in criterion(ended) if s.path in writing]
    return Choice(facts, criterion(facts), in_use)


def tell(chosen: Sequence[Choice], failures: Sequence[Failure], as_json: bool) -> None:
    """What `remove` would do, and what could not be looked at."""
    if as_json:
        print_json_list(map(_choice_as_json, chosen), failures)
    else:
        for choice in chosen:
            print_choice(console(), choice)
    finish(failures)


def print_choice(out: Console, choice: Choice) -> None:
    """What would be removed, and what would not and why."""
    out.print(
        f"{escape(choice.root)}: would remove {len(choice.segments)} of "
        f"{len(choice.facts.segments)} segments, {human_bytes(choice.allocated_bytes)}",
        soft_wrap=True,
    )
    _print_staying(out, choice.in_use)


def _print_staying(out: Console, segments: Sequence[SegmentFacts]) -> None:
    if segments:
        size = sum(segment.allocated_bytes for segment in segments)
        stay = "stays" if len(segments) == 1 else "stay"
        out.print(
            f"  [yellow]{len(segments)} {stay}, {human_bytes(size)}: "
            "in use by a running engine[/]"
        )


def remove(chosen: Sequence[Choice], failures: Sequence[Failure], as_json: bool) -> None:
    """Removes and reports. Exit code 1 if the file system refused something."""
    outcomes, more = on_each(chosen, _remove, lambda choice: choice.root)
    failures = (*failures, *more)
    if as_json:
        documents = (removed_as_json(c.facts, removed, c.in_use) for c, removed in outcomes)
        print_json_list(documents, failures)
    else:
        for choice, removed in outcomes:
            print_removed(console(), choice.facts, removed, choice.in_use)
    finish(failures, wrong=any(removed.refused for _, removed in outcomes))


def _remove(choice: Choice) -> tuple[Choice, Removed]:
    removed = care.remove_segments(choice.facts.root, choice.segments)
    left = look_at(Path(choice.root))
    care.remove_manifests(choice.facts.root, care.forgettable(left, time.time()))
    return choice, removed


def print_removed(
    out: Console, facts: RootFacts, removed: Removed, in_use: Sequence[SegmentFacts] = ()
) -> None:
    """What was removed, and what was not and why."""
    out.print(
        f"{escape(facts.root.path)}: removed {len(removed.segments)} of {len(facts.segments)} "
        f"segments, {human_bytes(removed.allocated_bytes)}",
        soft_wrap=True,
    )
    _print_staying(out, (*in_use, *removed.busy))
    for segment in removed.refused:
        out.print(
            f"  [red]cannot remove {escape(segment.path)}[/]; look at its owner and attributes",
            soft_wrap=True,
        )


def removed_as_json(
    facts: RootFacts, removed: Removed, in_use: Sequence[SegmentFacts] = ()
) -> dict[str, Any]:
    return {
        "root": facts.root.path,
        "removed": [segment_as_json(segment) for segment in removed.segments],
        "removed_bytes": removed.allocated_bytes,
        "busy": [segment_as_json(segment) for segment in (*in_use, *removed.busy)],
        "refused": [segment_as_json(segment) for segment in removed.refused],
    }


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    return {
        "root": choice.root,
        "would_remove": [segment_as_json(segment) for segment in choice.segments],
        "would_remove_bytes": choice.allocated_bytes,
        "busy": [segment_as_json(segment) for segment in choice.in_use],
    }
