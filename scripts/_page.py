# SPDX-License-Identifier: Apache-2.0
"""Generated tables in a page that people write: printed, put between markers, or compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def replaced(page: Path, begin: str, end: str, tables: str) -> str:
    """The page's text with `tables` between its markers; SystemExit if it has none."""
    before, found, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        sys.exit(f"{page.name} has no markers; add these two lines:\n{begin}\n{end}")
    return f"{before}{begin}\n\n{tables}\n\n{end}{after}"


def main(
    doc: str, page: Path, markers: tuple[str, str], tables: Callable[[], str], stale: str
) -> None:
    """The command of a script: prints, or does --write or --check; `stale` is its verdict."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.check or arguments.write):
        print(tables())
        return
    old, new = page.read_text(), replaced(page, *markers, tables())
    if arguments.write:
        page.write_text(new)
    elif new != old:
        sys.exit(stale)
