# SPDX-License-Identifier: Apache-2.0
"""`prune`: frees room in a root by size, age, namespace, or what nobody can use."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from vllm_tiered_offload.cli.output import JsonOption, reports_errors, size_option
from vllm_tiered_offload.cli.removal import DryRunOption, remove, tell
from vllm_tiered_offload.cli.roots import RootsArgument, duration
from vllm_tiered_offload.store import maintenance as care
from vllm_tiered_offload.store.inspection import (
    NamespaceFacts,
    RootFacts,
    SegmentFacts,
    look_at,
)


@reports_errors
def prune(
    *,
    roots: RootsArgument,
    max_bytes: Annotated[
        str | None, typer.Option(help="Remove the oldest segments over this size.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove segments last written before: 12h, 30d, ...")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Remove one namespace, by the start of its fingerprint.")
    ] = None,
    orphans: Annotated[
        bool,
        typer.Option("--orphans", help="Remove private caches whose process is gone, strays."),
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove segments by exactly one criterion. Running engines take it for an eviction."""
    given = [max_bytes is not None, older_than is not None, namespace is not None, orphans]
    if sum(given) != 1:
        raise ValueError(
            "give exactly one of --max-bytes, --older-than, --namespace, --orphans"
        )
    limit = size_option(max_bytes, "--max-bytes")
    age = duration(older_than, "--older-than") if older_than is not None else None

    def choose(facts: RootFacts) -> list[SegmentFacts]:
        if limit is not None:
            return care.over_bytes(facts, limit)
        if age is not None:
            return care.older_than(facts, age, time.time())
        if namespace is not None:
            return care.of_namespaces(facts, [find_namespace(facts, namespace)])
        return care.orphans(facts)

    chosen = [(facts, choose(facts)) for facts in (look_at(root) for root in roots)]
    (tell if dry_run else remove)(chosen, as_json)


def find_namespace(facts: RootFacts, prefix: str) -> NamespaceFacts:
    """The one namespace whose fingerprint starts so.

    Raises:
        ValueError: none or several do.
    """
    found = [space for space in facts.namespaces if space.fingerprint.startswith(prefix)]
    if not prefix or len(found) != 1:
        raise ValueError(
            f"--namespace: {prefix!r} fits {len(found)} of the {len(facts.namespaces)} "
            f"namespaces in {facts.root.path}; ls shows them"
        )
    return found[0]
