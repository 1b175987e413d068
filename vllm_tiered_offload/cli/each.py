# SPDX-License-Identifier: Apache-2.0
"""Several roots, one after the other: what fails in one keeps nothing from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import typer

from vllm_tiered_offload.cli.output import NOT_DONE, WRONG, one_line, print_error, print_json

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Failure:
    """A root with which nothing could be done, and why."""

    root: str
    error: str


def on_each(
    items: Iterable[T], work: Callable[[T], R], root: Callable[[T], str] = str
) -> tuple[list[R], list[Failure]]:
    """`work` on every item; `root` names the root that an item stands for."""
    done: list[R] = []
    failures: list[Failure] = []
    for item in items:
        try:
            done.append(work(item))
        except (ValueError, OSError) as error:
            failures.append(Failure(root(item), one_line(error)))
    return done, failures


def print_json_list(documents: Iterable[dict[str, Any]], failures: Sequence[Failure]) -> None:
    """One list on stdout with an entry for each root, the failed ones last."""
    print_json([*documents, *(asdict(failure) for failure in failures)])


def finish(failures: Sequence[Failure], wrong: bool = False) -> None:
    """One line on stderr for each failure, and the exit code: 2 before 1 before 0."""
    for failure in failures:
        print_error(failure.error)
    if failures:
        raise typer.Exit(NOT_DONE)
    if wrong:
        raise typer.Exit(WRONG)
