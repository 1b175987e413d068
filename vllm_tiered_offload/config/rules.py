# SPDX-License-Identifier: Apache-2.0
"""What a value of a key may be: one small rule per kind, used to check and to document.

A rule turns what a person typed (JSON numbers and strings) into the typed value or
raises `ValueError` whose text continues the sentence "<key>: <value> ...".
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = _UNITS[f"{_letter}i"] = 1024**_power
_SIZE = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)
_MAX_SIZE = 2**63 - 1
_LONGEST_SHOWN = 120


class ConfigError(ValueError):
    """A key that cannot be used as given. One line; `key` is its full name."""

    def __init__(self, key: str, problem: str) -> None:
        self.key, self.problem = key, problem
        super().__init__(f"{key}: {problem}")


def show(value: object) -> str:
    """`value` on one line and not too long, for an error message."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def parse_size(value: object) -> int:
    """Bytes from `34359738368`, `"32GiB"` (also `"32Gi"`), `"500GB"` or `"1.5TiB"`.

    Decimal units are powers of 1000, binary ones of 1024, the case does not matter.
    A fraction of a byte is dropped. A bare `"32G"` is refused: tools disagree on it.

    Raises:
        ValueError: not a size, negative, or 2**63 bytes and more.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("is not a size; give bytes or a string such as '32GiB' or '500GB'")
    size = _size_from_text(value) if isinstance(value, str) else _size_from_number(value)
    if size < 0:
        raise ValueError("is negative; a size is 0 or more bytes")
    if size > _MAX_SIZE:
        raise ValueError("is too large; a size is below 8 EiB")
    return size


def _size_from_number(value: int | float) -> int:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("is not a size; give a finite number of bytes")
    return math.floor(value)


def _size_from_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        hint = ""
        if match is not None and f"{unit}ib" in _UNITS:
            number, letter = match.group(1), match.group(2).upper()
            hint = f"; write '{number}{letter}iB' (1024) or '{number}{letter}B' (1000)"
        raise ValueError(
            "is not a size" + (hint or "; give bytes or a string such as '32GiB' or '500GB'")
        )
    return math.floor(Decimal(match.group(1)) * _UNITS[unit])


def format_size(size: int) -> str:
    """The shortest exact text for `size`, which `parse_size` reads back: `"16MiB"`."""
    fits = [
        (size // unit, name)
        for letter in "eptgmk"
        for name in (f"{letter}ib", f"{letter}b")
        if size and size % (unit := _UNITS[name]) == 0
    ]
    if not fits:
        return str(size)
    number, name = min(fits)
    letters = f"{name[0].upper()}iB" if len(name) == 3 else f"{name[0].upper()}B"
    return f"{number}{letters}"


class Rule(Protocol):
    """Checks one value; `unit` and `allowed` are what the table of keys shows."""

    @property
    def unit(self) -> str: ...

    @property
    def allowed(self) -> str: ...

    def check(self, value: Any) -> Any:
        """The typed value; raises ValueError("<what is right>")."""


def _in_range(value: float, low: float | None, high: float | None, allowed: str) -> None:
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"is out of range; allowed: {allowed}")


@dataclass(frozen=True)
class Size:
    """Bytes, as `parse_size` reads them."""

    low: int = 0
    high: int | None = None
    multiple: int = 1
    power_of_two: bool = False
    unit: str = "bytes"

    @property
    def allowed(self) -> str:
        low = format_size(self.low) if self.low else "0"
        text = f"{low} to {format_size(self.high)}" if self.high else f"{low} or more"
        if self.power_of_two:
            return f"{text}, a power of two"
        return text if self.multiple == 1 else f"{text}, a multiple of {self.multiple}"

    def check(self, value: Any) -> int:
        size = parse_size(value)
        _in_range(size, self.low, self.high, self.allowed)
        if size % self.multiple or (self.power_of_two and size & (size - 1)):
            raise ValueError(f"does not fit; allowed: {self.allowed}")
        return size


@dataclass(frozen=True)
class Count:
    """A whole number."""

    low: int
    high: int
    unit: str = ""

    @property
    def allowed(self) -> str:
        return f"{self.low} to {self.high}"

    def check(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"is not a whole number; allowed: {self.allowed}")
        _in_range(value, self.low, self.high, self.allowed)
        return value


@dataclass(frozen=True)
class Number:
    """A number, whole or not: seconds, or a share of something."""

    low: float
    high: float
    unit: str

    @property
    def allowed(self) -> str:
        return f"{self.low:g} to {self.high:g}"

    def check(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"is not a number; allowed: {self.allowed}")
        if math.isnan(value):
            raise ValueError(f"is not a number; allowed: {self.allowed}")
        _in_range(value, self.low, self.high, self.allowed)
        return float(value)


@dataclass(frozen=True)
class Flag:
    """true or false; the strings "true" and "false" are refused as too easily mistaken."""

    unit: str = ""
    allowed: str = "true, false"

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError("is not a flag; allowed: true, false (without quotes)")
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]
    unit: str = ""

    @property
    def allowed(self) -> str:
        return ", ".join(f'"{word}"' for word in self.words)

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError(f"is not known; allowed: {self.allowed}")
        return value


@dataclass(frozen=True)
class Text:
    """A short printable string."""

    longest: int = 256
    unit: str = ""

    @property
    def allowed(self) -> str:
        return f"1 to {self.longest} printable characters"

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"is not a string; allowed: {self.allowed}")
        if not 1 <= len(value) <= self.longest or not value.isprintable():
            raise ValueError(f"does not fit; allowed: {self.allowed}")
        return value


@dataclass(frozen=True)
class Directories:
    """One absolute directory or a list of them (one per disk), as a tuple of paths."""

    unit: str = "path"
    allowed: str = "an absolute path, or a list of them"

    def check(self, value: Any) -> tuple[Path, ...]:
        given = list(value) if isinstance(value, list | tuple) else [value]
        if not given:
            raise ValueError("is empty; give at least one directory")
        paths = tuple(self._one(item) for item in given)
        for index, path in enumerate(paths):
            for other in paths[index + 1 :]:
                if path.is_relative_to(other) or other.is_relative_to(path):
                    raise ValueError(
                        f"has {str(path)!r} and {str(other)!r} in one another; "
                        "give separate directories, one per disk"
                    )
        return paths

    @staticmethod
    def _one(value: Any) -> Path:
        if not isinstance(value, str | os.PathLike):
            raise ValueError("is not a path; give a string, or a list of strings")
        text = os.fspath(value)
        if not text or not text.isprintable():
            raise ValueError("is not a path; give an absolute path of printable characters")
        expanded = os.path.expanduser(text)
        if not os.path.isabs(expanded):
            raise ValueError(f"is not absolute; did you mean {os.path.abspath(expanded)!r}?")
        return Path(os.path.normpath(expanded))


@dataclass(frozen=True)
class Objects:
    """A list of JSON objects, untouched."""

    unit: str = ""
    allowed: str = "a list of objects"

    def check(self, value: Any) -> tuple[Mapping[str, Any], ...]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError('is not a list; give a list such as [{"type": "odirect_fs", ...}]')
        for item in value:
            if not isinstance(item, Mapping):
                raise ValueError(f"holds {show(item)}, which is not an object with a 'type'")
        return tuple(value)


@dataclass(frozen=True)
class Object:
    """A JSON object that vLLM reads and checks itself."""

    unit: str = ""
    allowed: str = "an object, checked by vLLM"

    def check(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError('is not an object; give one such as {"backpressure_cls": "..."}')
        return value


@dataclass(frozen=True)
class Untouched:
    """A key that vLLM reads and checks itself."""

    allowed: str = "checked by vLLM"
    unit: str = ""

    def check(self, value: Any) -> Any:
        return value
