# SPDX-License-Identifier: Apache-2.0
"""`du`: where the bytes of a root are, and how far it is from its bound."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_tiered_offload.cli._roots import DirsArgument, RootDirOption, given_roots
from vllm_tiered_offload.cli.each import finish, on_each, print_json_list
from vllm_tiered_offload.cli.facts import model_of, short
from vllm_tiered_offload.cli.output import (
    JsonOption,
    bar,
    console,
    human_bytes,
    reports_errors,
    table,
)
from vllm_tiered_offload.store.inspection import RootFacts, look_at

_LONG_BAR, _SHORT_BAR = 30, 15  # characters; the short one leaves room for a model


@reports_errors
def du(
    dirs: DirsArgument = None,
    *,
    root_dir: RootDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bytes of a root by namespace, its bound, and what is free on its file system."""
    found, failures = on_each(given_roots(dirs, root_dir), look_at)
    if as_json:
        print_json_list(map(_as_json, found), failures)
    else:
        for facts in found:
            _print_root(console(), facts)
    finish(failures)


def _states(facts: RootFacts) -> Counter[str]:
    return Counter(segment.state for segment in facts.segments if segment.header)


def _as_json(facts: RootFacts) -> dict[str, Any]:
    geometry = facts.root.geometry
    return {
        "root": facts.root.path,
        "bytes": facts.allocated_bytes,
        "other_bytes": facts.root.foreign_bytes,
        "max_bytes": geometry.max_bytes,
        "segment_bytes": geometry.segment_bytes,
        "slots": facts.root.slots,
        "segments": dict(_states(facts)),
        "strays": [segment.path for segment in facts.strays],
        "chunks": sum(space.chunks for space in facts.namespaces),
        "free_bytes": facts.free_bytes,
        "namespaces": {space.fingerprint: space.allocated_bytes for space in facts.namespaces},
    }


def _print_root(out: Console, facts: RootFacts) -> None:
    out.print(f"[bold]{escape(facts.root.path)}[/]", soft_wrap=True)
    out.print(_sums(facts))
    shares = table(["|namespace", "model", ">bytes", "|"])
    for space in sorted(facts.namespaces, key=lambda space: -space.allocated_bytes):
        if not space.segments:
            continue
        share = space.allocated_bytes / facts.allocated_bytes if facts.allocated_bytes else 0
        shares.add_row(
            short(space.fingerprint),
            escape(model_of(space)),
            human_bytes(space.allocated_bytes),
            f"{bar(share, _SHORT_BAR)} {share:.0%}",
        )
    if shares.row_count:
        out.print(shares)


def _sums(facts: RootFacts) -> Table:
    held = facts.allocated_bytes + facts.root.foreign_bytes
    bound = facts.root.geometry.max_bytes
    rows = table(["", ">", ""])
    rows.show_header = False
    rows.add_row(
        "in use",
        human_bytes(held),
        f"{bar(held / bound, _LONG_BAR)} {held / bound:.0%} of {human_bytes(bound)}"
        if bound
        else "no max_bytes: bounded by min_free_bytes",
    )
    rows.add_row("segments", str(len(facts.segments)), _segments(facts))
    rows.add_row("chunks", f"{sum(space.chunks for space in facts.namespaces):,}", "")
    rows.add_row("free", human_bytes(facts.free_bytes), "on the file system")
    if facts.strays:
        names = ", ".join(segment.path.rsplit("/", 1)[1] for segment in facts.strays)
        rows.add_row("[yellow]strays[/]", str(len(facts.strays)), f"no segments: {names}")
    return rows


def _segments(facts: RootFacts) -> str:
    states = [f"{count} {state}" for state, count in sorted(_states(facts).items())]
    size = human_bytes(facts.root.geometry.segment_bytes)
    return f"{', '.join(states)}; {size} each" if states else ""
