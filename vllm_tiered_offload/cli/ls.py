# SPDX-License-Identifier: Apache-2.0
"""`ls`: the namespaces of a root, each with its identity in words."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vllm_tiered_offload.cli.output import (
    JsonOption,
    console,
    human_bytes,
    print_json,
    reports_errors,
    table,
)
from vllm_tiered_offload.cli.roots import (
    RootsArgument,
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
from vllm_tiered_offload.store.inspection import NamespaceFacts, RootFacts, look_at

_LONGEST_VALUE = 300


@reports_errors
def ls(
    *,
    roots: RootsArgument,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Every field of every identity.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces of a root: model, identity, chunks, bytes, last write."""
    found = [look_at(root) for root in roots]
    if as_json:
        print_json(
            [
                {
                    "root": facts.root.path,
                    "namespaces": [space_as_json(space) for space in facts.namespaces],
                }
                for facts in found
            ]
        )
        return
    for facts in found:
        _print_root(console(), facts, long)


def _print_root(out: Console, facts: RootFacts, long: bool) -> None:
    out.print(f"[bold]{escape(facts.root.path)}[/]  {len(facts.namespaces)} namespace(s)")
    spaces = sorted(facts.namespaces, key=lambda space: -space.allocated_bytes)
    rows = table(
        ["|namespace", "model", "identity", "kind", ">chunk", ">chunks", ">bytes", "|written"]
    )
    for space in spaces:
        rows.add_row(
            short(space.fingerprint),
            escape(model_of(space)),
            escape(identity_of(space)),
            _kind(space),
            chunk_sizes(space),
            f"{space.chunks:,}",
            human_bytes(space.allocated_bytes),
            ago(space.written_at),
        )
    if spaces:
        out.print(rows)
    if long:
        for space in spaces:
            _print_identity(out, space)


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
