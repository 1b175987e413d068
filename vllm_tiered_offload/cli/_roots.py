# SPDX-License-Identifier: Apache-2.0
"""The directories that a command is given: by position, by `--root-dir`, or both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

RootsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[ROOT_DIR]...",
        help="Root directories, as root_dir in the configuration.",
        show_default=False,
    ),
]
RootDirOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--root-dir",
        "-r",
        metavar="ROOT_DIR",
        help="The same, by name; may be repeated.",
        show_default=False,
    ),
]


def given_roots(
    roots: Sequence[Path] | None, root_dir: Sequence[Path] | None, most: int | None = None
) -> list[Path]:
    """All directories given in either form, each once; empty where none was.

    Raises:
        ValueError: more than `most`.
    """
    found = list(dict.fromkeys((*(roots or ()), *(root_dir or ()))))
    if most is not None and len(found) > most:
        names = ", ".join(map(str, found))
        raise ValueError(f"--root-dir: {len(found)} directories given, {most} wanted: {names}")
    return found


def required_roots(
    roots: Sequence[Path] | None, root_dir: Sequence[Path] | None, most: int | None = None
) -> list[Path]:
    """As `given_roots`, at least one.

    Raises:
        ValueError: none, or more than `most`.
    """
    found = given_roots(roots, root_dir, most)
    if not found:
        raise ValueError("give a root directory, as an argument or with --root-dir")
    return found
