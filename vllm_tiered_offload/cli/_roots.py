# SPDX-License-Identifier: Apache-2.0
"""The directories that a command is given: by position, by `--root-dir`, or both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

DirsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="ROOT_DIR",
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
    dirs: Sequence[Path] | None, root_dir: Sequence[Path] | None, *, required: bool = True
) -> list[Path]:
    """All directories given in either form, each once.

    Raises:
        ValueError: none was, and one is `required`.
    """
    found = list(dict.fromkeys((*(dirs or ()), *(root_dir or ()))))
    if required and not found:
        raise ValueError("give a root directory, as an argument or with --root-dir")
    return found
