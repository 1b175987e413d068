# SPDX-License-Identifier: Apache-2.0
"""`clear`: empties a root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vllm_tiered_offload.cli._roots import DirsArgument, RootDirOption, given_roots
from vllm_tiered_offload.cli.each import on_each
from vllm_tiered_offload.cli.output import (
    JsonOption,
    error_console,
    human_bytes,
    reports_errors,
)
from vllm_tiered_offload.cli.removal import (
    Choice,
    DryRunOption,
    choose,
    print_choice,
    remove,
    tell,
)
from vllm_tiered_offload.store.inspection import look_at
from vllm_tiered_offload.store.maintenance import removal_order


@reports_errors
def clear(
    dirs: DirsArgument = None,
    *,
    root_dir: RootDirOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove all chunks of a root, except what a running engine is writing."""
    wanted = given_roots(dirs, root_dir)
    if as_json and not (yes or dry_run):
        raise ValueError("--json asks nothing: clear needs --yes with it")

    def work(root: Path) -> Choice:
        return choose(look_at(root), removal_order)

    chosen, failures = on_each(wanted, work)
    if dry_run:
        tell(chosen, failures, as_json)
        return
    if not yes:
        _ask([choice for choice in chosen if choice.segments])
    remove(chosen, failures, as_json)


def _ask(chosen: Sequence[Choice]) -> None:
    """Ends the command unless the answer is yes. Nothing to remove: no question."""
    if not chosen:
        return
    for choice in chosen:
        print_choice(error_console(), choice)
    count = sum(len(choice.segments) for choice in chosen)
    size = human_bytes(sum(choice.allocated_bytes for choice in chosen))
    typer.confirm(f"Remove {count} segments, {size} of cached KV?", abort=True, err=True)
