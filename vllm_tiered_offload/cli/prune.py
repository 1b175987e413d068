# SPDX-License-Identifier: Apache-2.0
"""`prune`: frees room in a root by size, age, namespace, or what nobody can use."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vllm_tiered_offload.cli._roots import DirsArgument, RootDirOption, given_roots
from vllm_tiered_offload.cli.each import on_each
from vllm_tiered_offload.cli.facts import duration
from vllm_tiered_offload.cli.output import JsonOption, reports_errors, size_option
from vllm_tiered_offload.cli.removal import (
    Choice,
    Criterion,
    DryRunOption,
    choose,
    remove,
    tell,
)
from vllm_tiered_offload.store import maintenance as care
from vllm_tiered_offload.store.inspection import NamespaceFacts, RootFacts, look_at


@reports_errors
def prune(
    dirs: DirsArgument = None,
    *,
    root_dir: RootDirOption = None,
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
    wanted = given_roots(dirs, root_dir)
    criterion = _criterion(max_bytes, older_than, namespace, orphans)

    def work(root: Path) -> Choice:
        return choose(look_at(root), criterion)

    chosen, failures = on_each(wanted, work)
    (tell if dry_run else remove)(chosen, failures, as_json)


def _criterion(
    max_bytes: str | None, older_than: str | None, namespace: str | None, orphans: bool
) -> Criterion:
    """The one that was given.

    Raises:
        ValueError: none or several were, or its value is none.
    """
    given = [max_bytes is not None, older_than is not None, namespace is not None, orphans]
    if sum(given) != 1:
        raise ValueError(
            "give exactly one of --max-bytes, --older-than, --namespace, --orphans"
        )
    limit = size_option(max_bytes, "--max-bytes")
    if limit is not None:
        return partial(care.over_bytes, max_bytes=limit)
    if older_than is not None:
        age = duration(older_than, "--older-than")
        return partial(care.older_than, seconds=age, now=time.time())
    if namespace is not None:
        return lambda facts: care.of_namespaces(facts, [find_namespace(facts, namespace)])
    return care.orphans


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
