# SPDX-License-Identifier: Apache-2.0
"""What `doctor` looks at. Every check is one line: what was found and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `advice` is empty only where nothing is to be done."""

    name: str
    level: Level
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warn(name: str, found: str, advice: str) -> Check:
    return Check(name, "warn", found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    return Check(name, "fail", found, advice)
