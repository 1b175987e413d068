# SPDX-License-Identifier: Apache-2.0
"""Memory limits of the control groups this process is in, v1 and v2, all levels up.

Shared memory counts against them; going over is an OOM kill without a word.
File formats: the kernel's admin-guide, cgroup-v1/memory and cgroup-v2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # v1 says "no limit" with a number near 2**63


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: bytes still available under it, the limit in bytes, and the file."""

    available: int
    limit: int
    file: Path


@dataclass(frozen=True, slots=True)
class _Version:
    limit: str
    usage: str
    cache: tuple[str, str]  # what the kernel drops when it needs room


_V1 = _Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version("memory.max", "memory.current", ("inactive_file", "active_file"))


def limits(root: Path = Path("/")) -> list[Limit]:
    """All limits that apply, innermost first; [] where none can be read."""
    found = []
    for version, directory in _directories(root):
        try:
            limit = _limit(version, directory)
        except (OSError, ValueError):
            continue  # the root group has no such files
        if limit is not None:
            found.append(limit)
    return found


def _limit(version: _Version, directory: Path) -> Limit | None:
    file = directory / version.limit
    text = file.read_text().strip()
    if text == "max" or int(text) >= _UNLIMITED:
        return None
    used = int((directory / version.usage).read_text())
    stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    cache = sum(int(stat.get(name, 0)) for name in version.cache)
    return Limit(int(text) - used + min(cache, used), int(text), file)


def _directories(root: Path) -> Iterator[tuple[_Version, Path]]:
    """This process's group and all above it that are visible, in each hierarchy."""
    for version, group in _groups(root):
        for mount_root, mount_point in _mounts(root, version):
            relative = os.path.relpath(group, mount_root)
            top = root / mount_point.lstrip("/")
            if relative.startswith(".."):  # the mount shows our own group as its top
                relative = "."
            directory = top / relative
            while True:
                yield version, directory
                if directory == top:
                    break
                directory = directory.parent


def _groups(root: Path) -> Iterator[tuple[_Version, str]]:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _mounts(root: Path, version: _Version) -> Iterator[tuple[str, str]]:
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        fields = before.split(" ")
        is_v1 = kind == "cgroup" and "memory" in options.split(",")
        if (kind == "cgroup2") if version is _V2 else is_v1:
            yield fields[3], fields[4]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
