# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: sizes, a table with bars, a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

console = Console(width=110, highlight=False)


@dataclass(frozen=True)
class Bar:
    """A measured number and where it has to land: `at most` or `at least` the limit."""

    what: str
    value: float
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def print_bars(bars: Sequence[Bar]) -> bool:
    """Says whether all hold."""
    table = Table(title="bars", title_justify="left")
    for column in ("what", "measured", "bar", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        verdict = "[green]pass[/]" if bar.holds else "[red]FAIL[/]"
        value, limit = f"{bar.value:.3g} {bar.unit}", f"{sign} {bar.limit:g} {bar.unit}"
        table.add_row(bar.what, value.strip(), limit.strip(), verdict)
    console.print(table)
    return all(bar.holds for bar in bars)


def write_json(path: Path | None, measured: dict[str, object], bars: Sequence[Bar]) -> None:
    if path is not None:
        verdicts = [asdict(bar) | {"holds": bar.holds} for bar in bars]
        path.write_text(json.dumps({**measured, "bars": verdicts}, indent=2) + "\n")
