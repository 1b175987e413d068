# SPDX-License-Identifier: Apache-2.0
"""What all commands share: where text goes, how numbers look, and exit codes.

Exit codes: 0 done and nothing is wrong; 1 done, and something is wrong (a failed check, a
damaged chunk); 2 not done (bad arguments, a directory or server out of reach).
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_tiered_offload.config import parse_size
from vllm_tiered_offload.store.syscalls import explain

P = ParamSpec("P")
R = TypeVar("R")

OK, WRONG, NOT_DONE = 0, 1, 2
# Columns of a pipe: a row of a table stays one line, for grep and cut.
_PIPE = 1000

JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout instead of text.")
]


def console() -> Console:
    """Where results go."""
    result = Console(highlight=False, soft_wrap=False)
    if not result.is_terminal and "COLUMNS" not in os.environ:
        result.width = _PIPE
    return result


def error_console() -> Console:
    """Where progress and errors go, so that stdout can be piped."""
    return Console(stderr=True, highlight=False)


def print_json(document: Any) -> None:
    """One document on stdout; paths become strings."""
    sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")


def reports_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Turns the errors that a user can cause into one line and exit code 2."""

    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ValueError, OSError) as error:
            if kwargs.get("as_json"):
                print_json({"error": one_line(error)})
            print_error(one_line(error))
            raise typer.Exit(NOT_DONE) from None

    return command


def print_error(line: str) -> None:
    error_console().print(f"[bold red]error[/] {escape(line)}", soft_wrap=True)


def one_line(error: Exception) -> str:
    """What went wrong; the path and the errno's name where the system said so."""
    if isinstance(error, OSError) and error.errno is not None:
        path = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return f"{path}{explain(error)}"
    return str(error)


def size_option(text: str | None, option: str) -> int | None:
    """A size typed on the command line; None stays None.

    Raises:
        ValueError: not a size, in one line that names `option`.
    """
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{option}: {text!r} {error}") from None


def human_bytes(size: float) -> str:
    """`1.5 GiB`: binary units, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} PiB"


def human_count(count: float) -> str:
    """`15.1 M`: thousands in words, three significant digits."""
    for unit in ("", " k", " M", " G"):
        if abs(count) < 999.5:
            return f"{count:.0f}" if unit == "" else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"


def bar(share: float, length: int) -> str:
    """Markup: `length` characters, of which `share` (0 to 1) are full."""
    full = round(min(1.0, max(0.0, share)) * length)
    return f"[cyan]{'█' * full}[/][dim]{'░' * (length - full)}[/]"


def human_seconds(seconds: float) -> str:
    """`3 min`, `2 h`, `5 days`: one unit."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def table(columns: Iterable[str], *, title: str | None = None) -> Table:
    """A plain table. A name that starts with `>` is a column of numbers, right-aligned; one
    that starts with `|` is a column that is never broken into lines."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for name in columns:
        mark = name[:1]
        result.add_column(
            name.lstrip(">|"),
            justify="right" if mark == ">" else "left",
            header_style="dim",
            no_wrap=mark in (">", "|"),
            overflow="fold",
        )
    return result
