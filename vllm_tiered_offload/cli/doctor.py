# SPDX-License-Identifier: Apache-2.0
"""`doctor`: is this machine fit for the tiers, and what to do where it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from vllm_tiered_offload.cli._roots import DirsArgument, RootDirOption, given_roots
from vllm_tiered_offload.cli.checks import Check, fail
from vllm_tiered_offload.cli.checks.configuration import check_configuration
from vllm_tiered_offload.cli.checks.directory import check_directory
from vllm_tiered_offload.cli.checks.installation import check_installation
from vllm_tiered_offload.cli.checks.machine import check_machine
from vllm_tiered_offload.cli.checks.memory import check_memory
from vllm_tiered_offload.cli.checks.speed import check_speed
from vllm_tiered_offload.cli.output import (
    WRONG,
    JsonOption,
    console,
    print_json,
    reports_errors,
    table,
)
from vllm_tiered_offload.config import FsTierSettings, SpecSettings, Transfer, read_transfer
from vllm_tiered_offload.store.syscalls import explain

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}
_MARK_WIDTH, _NAME_WIDTH = 4, 13
Sections = dict[str, list[Check]]


@reports_errors
def doctor(
    dirs: DirsArgument = None,
    *,
    root_dir: RootDirOption = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE",
            help="A --kv-transfer-config, as JSON or as a file that holds it.",
        ),
    ] = None,
    kv_offloading_size: Annotated[
        float | None,
        typer.Option(min=0, metavar="GIB", help="vLLM's option, if it goes with --config."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, max=60, help="Length of the speed probe; 0 leaves it out.")
    ] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Look at kernel, memory, vLLM, directories and a configuration, and say what to do."""
    transfer = _read_config(config, kv_offloading_size)
    sections: Sections = {"machine": list(check_machine())}
    sections["memory"] = list(_memory(transfer.settings if transfer else None))
    sections["vLLM"] = list(check_installation())
    if transfer is not None:
        sections["configuration"] = list(check_configuration(transfer))
    given = given_roots(dirs, root_dir, required=False)
    roots: dict[Path, FsTierSettings | None] = {root.absolute(): None for root in given}
    for tier in transfer.tiers if transfer else ():
        roots |= dict.fromkeys(tier.root_dir, tier)
    for root, settings in roots.items():
        sections[str(root)] = list(_directory(root, settings, seconds))
    _report(sections, as_json)
    if any(check.level == "fail" for checks in sections.values() for check in checks):
        raise typer.Exit(WRONG)


def _memory(settings: SpecSettings | None) -> Iterator[Check]:
    if settings is None:
        return check_memory()
    return check_memory(settings.cpu_bytes_to_use, settings.huge_pages, settings.region_backing)


def _directory(root: Path, tier: FsTierSettings | None, seconds: float) -> Iterator[Check]:
    reading = tier is not None and tier.mode == "read"
    checks = list(check_directory(root, tier.max_bytes if tier else None, reading))
    yield from checks
    if seconds and not reading and not any(check.level == "fail" for check in checks):
        try:
            yield from check_speed(root, seconds)
        except OSError as error:
            yield fail("speed", explain(error), "the probe needs some hundred MiB of room")


def _read_config(text: str | None, kv_offloading_size: float | None) -> Transfer | None:
    """What `--config` holds, checked.

    Raises:
        ValueError: not JSON, or not a file that holds some.
    """
    if text is None:
        return None
    document = _load(text)
    if not isinstance(document, Mapping):
        raise ValueError("--config: give a JSON object")
    return read_transfer(document, kv_offloading_size)


def _load(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"--config: {text!r} is neither JSON nor a file")
        text = path.read_text()
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"--config: not JSON: {error}") from None


def _report(sections: Sections, as_json: bool) -> None:
    if as_json:
        print_json(
            {title: [asdict(check) for check in checks] for title, checks in sections.items()}
        )
        return
    out = console()
    for title, checks in sections.items():
        _print_section(out, title, checks)
    levels = [check.level for checks in sections.values() for check in checks]
    out.print(
        f"\n{levels.count('ok')} ok, {levels.count('warn')} warn, {levels.count('fail')} fail"
    )


def _print_section(out: Console, title: str, checks: list[Check]) -> None:
    out.print(f"\n[bold]{escape(title)}[/]")
    names_fit = all(len(check.name) <= _NAME_WIDTH for check in checks)
    for check in checks:
        row = table(["", "", ""] if names_fit else ["", ""])
        row.show_header = False
        row.columns[0].min_width, row.columns[1].min_width = _MARK_WIDTH, _NAME_WIDTH
        name, found = escape(check.name), escape(check.found)
        row.add_row(
            _MARKS[check.level], *((name, found) if names_fit else (f"{name}: {found}",))
        )
        out.print(row)
        if check.advice:
            # Not in the table: a command in it should stay on one line.
            advice = Text(f"-> {check.advice}", style="cyan")
            out.print(Padding(advice, (0, 0, 0, _MARK_WIDTH + 2), expand=False))
