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

from vllm_tiered_offload.cli.checks import Check, fail, ok
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
from vllm_tiered_offload.config import ConfigError, FsTierSettings, SpecSettings
from vllm_tiered_offload.store.syscalls import explain

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}
_CPU_ONLY = ("AlignedCPUOffloadingSpec",)
Sections = dict[str, list[Check]]


@reports_errors
def doctor(
    *,
    root_dir: Annotated[
        list[Path] | None,
        typer.Option("--root-dir", "-r", help="A directory to look at; may be repeated."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="A --kv-transfer-config, as JSON or as a file that holds it."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, max=60, help="Length of the speed probe; 0 leaves it out.")
    ] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Look at kernel, memory, vLLM, directories and a configuration, and say what to do."""
    settings, configured = _read_config(config)
    sections: Sections = {"machine": list(check_machine())}
    sections["memory"] = list(_memory(settings))
    sections["vLLM"] = list(check_installation())
    if configured is not None:
        sections["configuration"] = [configured]
    for tier in settings.fs_tiers() if settings else ():
        for root in tier.root_dir:
            sections[str(root)] = list(_directory(root, tier, seconds))
    for root in root_dir or ():
        sections.setdefault(str(root), list(_directory(root.absolute(), None, seconds)))
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


def _read_config(text: str | None) -> tuple[SpecSettings | None, Check | None]:
    """The settings of `--config`, and the line about them.

    Raises:
        ValueError: not JSON, or not a file that holds some.
    """
    if text is None:
        return None, None
    extra = _extra_config(_load(text))
    tiering = extra.get("spec_name") not in _CPU_ONLY
    try:
        settings = SpecSettings.parse(extra, tiering=tiering)
    except ConfigError as error:
        return None, fail("keys", str(error), "correct it; vLLM will stop with the same line")
    return settings, ok(
        "keys", f"{len(extra)} keys, {len(settings.fs_tiers())} odirect_fs tier(s)"
    )


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


def _extra_config(document: Any) -> Mapping[str, Any]:
    """Our keys, from a whole --kv-transfer-config or from its inner object alone."""
    if not isinstance(document, Mapping):
        raise ValueError("--config: give a JSON object")
    for name in ("kv_transfer_config", "kv_connector_extra_config"):
        inner = document.get(name)
        if isinstance(inner, Mapping):
            return _extra_config(inner)
    return document


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
    rows = table(["", "", ""])
    rows.show_header = False
    rows.columns[0].min_width, rows.columns[1].min_width = 4, 13
    for check in checks:
        text = escape(check.found)
        if check.advice:
            text += f"\n[cyan]-> {escape(check.advice)}[/]"
        rows.add_row(_MARKS[check.level], check.name, text)
    out.print(rows)
