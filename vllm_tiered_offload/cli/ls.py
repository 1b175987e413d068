# SPDX-License-Identifier: Apache-2.0
"""`ls`: the namespaces of a root, each with its identity in words."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_tiered_offload.cli._roots import DirsArgument, RootDirOption, given_roots
from vllm_tiered_offload.cli.each import finish, on_each, print_json_list
from vllm_tiered_offload.cli.facts import (
    ago,
    chunk_sizes,
    fields_of,
    identity_of,
    kind_of,
    meanings_of,
    model_of,
    short,
    space_as_json,
)
from vllm_tiered_offload.cli.output import (
    JsonOption,
    console,
    human_bytes,
    reports_errors,
    table,
)
from vllm_tiered_offload.store.inspection import NamespaceFacts, RootFacts, look_at

_LONGEST_VALUE = 300
_ROOMY = 120  # columns


@reports_errors
def ls(
    dirs: DirsArgument = None,
    *,
    root_dir: RootDirOption = None,
    long: Annotated[
        bool,
        typer.Option("--long", "-l", help="Every field of every identity, empty ones too."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces of a root: model, identity, chunks, bytes, last write."""
    found, failures = on_each(given_roots(dirs, root_dir), look_at)
    if as_json:
        print_json_list(map(_as_json, found), failures)
    else:
        for facts in found:
            _print_root(console(), facts, long)
    finish(failures)


def _as_json(facts: RootFacts) -> dict[str, Any]:
    return {
        "root": facts.root.path,
        "namespaces": [space_as_json(space) for space in facts.namespaces],
    }


def _print_root(out: Console, facts: RootFacts, long: bool) -> None:
    spaces = sorted(facts.namespaces, key=lambda space: -space.allocated_bytes)
    shown = [space for space in spaces if long or space.segments]
    title = f"[bold]{escape(facts.root.path)}[/]  {len(shown)} namespace(s)"
    if len(shown) < len(spaces):
        title += f"[dim]; {len(spaces) - len(shown)} without segments, --long has all[/]"
    out.print(title, soft_wrap=True)
    if shown:
        out.print(_overview(shown, out.width))
    if long:
        for space in shown:
            _print_identity(out, space)


def _overview(spaces: list[NamespaceFacts], width: int) -> Table:
    """A line a namespace where there is room for it, else its identity on lines of its own."""
    narrow = width < _ROOMY
    words = ["model, identity, kind"] if narrow else ["model", "identity", "kind"]
    rows = table(["|namespace", *words, ">chunk", ">chunks", ">bytes", "|written"])
    for space in spaces:
        identity = [escape(model_of(space)), escape(identity_of(space)), _kind(space)]
        rows.add_row(
            short(space.fingerprint),
            *(["\n".join(filter(None, identity))] if narrow else identity),
            chunk_sizes(space),
            f"{space.chunks:,}",
            human_bytes(space.allocated_bytes),
            ago(space.written_at),
        )
    return rows


def _kind(space: NamespaceFacts) -> str:
    kind = kind_of(space)
    return f"[yellow]{kind}[/]" if space.orphaned else kind


def _print_identity(out: Console, space: NamespaceFacts) -> None:
    out.print(f"\n[bold]{space.fingerprint}[/]  {escape(model_of(space))}")
    meanings = meanings_of(space)
    rows = table(["field", "value", "what it is"])
    for name, value in fields_of(space).items():
        text = json.dumps(value)
        if len(text) > _LONGEST_VALUE:
            text = text[:_LONGEST_VALUE] + f"... ({len(text)} characters; --json has all)"
        rows.add_row(name, escape(text), escape(str(meanings.get(name, ""))))
    out.print(rows)
