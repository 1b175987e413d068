# SPDX-License-Identifier: Apache-2.0
"""`clear`: empties a root."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_tiered_offload.cli.output import JsonOption, human_bytes, reports_errors
from vllm_tiered_offload.cli.removal import DryRunOption, remove, tell
from vllm_tiered_offload.cli.roots import RootsArgument
from vllm_tiered_offload.store.inspection import look_at
from vllm_tiered_offload.store.maintenance import removal_order


@reports_errors
def clear(
    *,
    roots: RootsArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove all chunks of a root, except what a running engine is writing."""
    found = [look_at(root) for root in roots]
    chosen = [(facts, removal_order(facts)) for facts in found]
    if dry_run:
        tell(chosen, as_json)
        return
    if not yes:
        if as_json:
            raise ValueError("--json asks nothing: clear needs --yes with it")
        size = sum(facts.allocated_bytes for facts in found)
        typer.confirm(f"Remove {human_bytes(size)} of cached KV?", abort=True, err=True)
    remove(chosen, as_json)
