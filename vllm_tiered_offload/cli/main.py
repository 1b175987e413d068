# SPDX-License-Identifier: Apache-2.0
"""The command line: `vllm-tiered-offload COMMAND`."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_tiered_offload import __version__
from vllm_tiered_offload.cli.bench import bench
from vllm_tiered_offload.cli.clear import clear
from vllm_tiered_offload.cli.doctor import doctor
from vllm_tiered_offload.cli.du import du
from vllm_tiered_offload.cli.ls import ls
from vllm_tiered_offload.cli.plan import plan
from vllm_tiered_offload.cli.prune import prune
from vllm_tiered_offload.cli.top import top
from vllm_tiered_offload.cli.verify import verify

app = typer.Typer(
    name="vllm-tiered-offload",
    help="Plan, check and look after the CPU and disk tiers of vLLM's KV cache.",
    epilog="Exit codes: 0 all is well; 1 something is wrong; 2 it could not be done.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit."),
    ] = False,
) -> None:
    """Plan, check and look after the CPU and disk tiers of vLLM's KV cache."""


for command in (doctor, plan, ls, du, verify, prune, clear, bench, top):
    app.command()(command)


if __name__ == "__main__":
    app()
