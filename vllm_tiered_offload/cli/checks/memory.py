# SPDX-License-Identifier: Apache-2.0
"""Memory: what is there, what the control group allows, and which pages it comes in."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_tiered_offload.cli.checks import Check, fail, ok, warn
from vllm_tiered_offload.cli.output import human_bytes
from vllm_tiered_offload.region import huge_pages

ROOT = Path("/")
# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT = 1 << 60
_SMALL_SHM = 64 << 20  # Docker's default


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The tightest limit over this process and its ancestors, and what is used of it."""

    limit: int
    used: int
    file: Path


def cgroup_memory(root: Path = ROOT) -> CgroupMemory | None:
    """The limit that binds, v2 or v1; None where nothing limits memory."""
    found = [
        limit
        for version, path in _own_cgroups(root)
        for limit in _limits_upwards(root / "sys/fs/cgroup" / version, path)
    ]
    return min(found, key=lambda item: item.limit - item.used, default=None)


def _own_cgroups(root: Path) -> Iterator[tuple[str, str]]:
    """(directory below /sys/fs/cgroup, path) of the controllers of memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "", path
        elif "memory" in controllers.split(","):
            yield "memory", path


def _limits_upwards(mount: Path, path: str) -> Iterator[CgroupMemory]:
    # Inside a container the path may be the host's; the mount's root is then the limit.
    inner = Path(path.lstrip("/"))
    for directory in (inner, *inner.parents):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit_file = mount / directory / limit_name
            try:
                limit = int(limit_file.read_text())
                used = int((mount / directory / used_name).read_text())
            except (OSError, ValueError):  # no such controller here, or "max"
                continue
            if limit < _NO_LIMIT:
                yield CgroupMemory(limit, used, limit_file)


def check_memory(
    pool_bytes: int = 0, huge: str = "auto", backing: str = "memfd", root: Path = ROOT
) -> Iterator[Check]:
    """Checks for a pool of `pool_bytes` (0: not known) made as the settings say."""
    available = psutil.virtual_memory().available
    yield _fits("memory", f"{human_bytes(available)} available", available, pool_bytes)
    yield _cgroup(cgroup_memory(root), pool_bytes)
    yield _shm(os.statvfs(root / "dev/shm"), pool_bytes if backing == "shm" else 0)
    yield _locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], pool_bytes)
    yield _huge_pages(huge, backing, pool_bytes, root / "sys/kernel/mm")


def _fits(name: str, found: str, room: int, need: int) -> Check:
    if need > room:
        return fail(
            name,
            f"{found}, the pool takes {human_bytes(need)}",
            f"lower cpu_bytes_to_use to less than {human_bytes(room)}, or give more memory",
        )
    return ok(name, found)


def _cgroup(limit: CgroupMemory | None, pool_bytes: int) -> Check:
    if limit is None:
        return ok("control group", "no memory limit")
    room = limit.limit - limit.used
    found = f"limit {human_bytes(limit.limit)}, {human_bytes(room)} free ({limit.file})"
    return _fits("control group", found, room, pool_bytes)


def _shm(stat: os.statvfs_result, need: int) -> Check:
    free = stat.f_bavail * stat.f_frsize
    size = stat.f_blocks * stat.f_frsize
    found = f"{human_bytes(free)} of {human_bytes(size)} free"
    if need > free:
        return fail(
            "/dev/shm",
            f"{found}, the pool takes {human_bytes(need)}",
            "use region_backing 'memfd', or enlarge it (docker run --shm-size)",
        )
    if size <= _SMALL_SHM:
        return warn(
            "/dev/shm",
            found,
            "enough for us (memfd needs none); vLLM's own workers want --shm-size=1g or more",
        )
    return ok("/dev/shm", f"{found}; not needed for a memfd")


def _locked(limit: int, pool_bytes: int) -> Check:
    if limit in (-1, resource.RLIM_INFINITY):
        return ok("locked memory", "no limit")
    found = f"limit {human_bytes(limit)}"
    if limit < max(pool_bytes, 1 << 30):
        return warn(
            "locked memory",
            found,
            "matters for RDMA and some drivers that pin the pool: ulimit -l unlimited",
        )
    return ok("locked memory", found)


def _huge_pages(wanted: str, backing: str, pool_bytes: int, mm: Path) -> Check:
    if wanted == "off":
        return ok("huge pages", "switched off in the settings")
    if wanted in ("2MB", "1GB"):
        return _reserved(wanted, pool_bytes, mm)
    hint = huge_pages.hint(backing, mm / "transparent_hugepage")
    if hint:
        return warn(
            "huge pages",
            "none for the pool: its I/O costs up to four times the CPU time",
            f"{hint}",
        )
    return ok("huge pages", "transparent ones are allowed for shared memory")


def _reserved(wanted: str, pool_bytes: int, mm: Path) -> Check:
    size = (2 << 20) if wanted == "2MB" else (1 << 30)
    file = mm / f"hugepages/hugepages-{size >> 10}kB/free_hugepages"
    try:
        free = int(file.read_text())
    except (OSError, ValueError):
        return fail("huge pages", f"this kernel has no pages of {wanted}", "use 'auto'")
    found = f"{free} free pages of {wanted}"
    need = -(-pool_bytes // size)
    if free < max(need, 1):
        target = file.with_name("nr_hugepages")
        return fail(
            "huge pages", found, f"reserve {max(need, 1)}: echo {need or 'N'} > {target}"
        )
    return ok("huge pages", found)
