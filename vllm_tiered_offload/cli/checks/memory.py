# SPDX-License-Identifier: Apache-2.0
"""Memory: what is there, what the control group allows, and which pages it comes in.

Whether a pool fits is asked of the region's own preflight, so that doctor and the engine
never disagree.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from vllm_tiered_offload.cli.checks import Check, fail, ok, warn
from vllm_tiered_offload.cli.output import human_bytes
from vllm_tiered_offload.region import cgroup, huge_pages, preflight
from vllm_tiered_offload.region.settings import RegionError

ROOT = Path("/")
_SMALL_SHM = 64 << 20  # Docker's default
_HUGE = {"2MB": 2 << 20, "1GB": 1 << 30}


def check_memory(
    pool_bytes: int = 0, huge: str = "auto", backing: str = "memfd", root: Path = ROOT
) -> Iterator[Check]:
    """Checks for a pool of `pool_bytes` (0: not known) made as the settings say."""
    yield ok("memory", f"{human_bytes(psutil.virtual_memory().available)} available")
    yield _cgroup(root)
    yield _shm(os.statvfs(root / "dev/shm"))
    yield _locked(pool_bytes)
    yield _huge_pages(huge, backing, root / "sys/kernel/mm/transparent_hugepage")
    if pool_bytes:
        yield _pool(pool_bytes, huge, backing, root)


def _cgroup(root: Path) -> Check:
    limits = cgroup.limits(root)
    if not limits:
        return ok("control group", "no memory limit")
    tightest = min(limits, key=lambda limit: limit.available)
    return ok(
        "control group",
        f"limit {human_bytes(tightest.limit)}, {human_bytes(max(0, tightest.available))} "
        f"available ({tightest.file})",
    )


def _shm(stat: os.statvfs_result) -> Check:
    size = stat.f_blocks * stat.f_frsize
    found = f"{human_bytes(stat.f_bavail * stat.f_frsize)} of {human_bytes(size)} free"
    if size <= _SMALL_SHM:
        return warn(
            "/dev/shm",
            found,
            "enough for us (memfd needs none); vLLM's own workers want --shm-size=1g or more",
        )
    return ok("/dev/shm", f"{found}; not needed for a memfd")


def _locked(pool_bytes: int) -> Check:
    note = preflight.locked_memory_note(pool_bytes)
    if note:
        return warn("locked memory", *_found_and_advice(note, ": "))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = "no limit" if limit == resource.RLIM_INFINITY else f"limit {human_bytes(limit)}"
    return ok("locked memory", words)


def _huge_pages(wanted: str, backing: str, transparent: Path) -> Check:
    if wanted == "off":
        return ok("huge pages", "switched off in the settings")
    if wanted in _HUGE:
        return ok("huge pages", f"reserved ones of {wanted}, as the settings say")
    hint = huge_pages.hint(backing, transparent)
    if hint:
        found = "none for the pool: its I/O costs up to four times the CPU time"
        return warn("huge pages", found, hint)
    return ok("huge pages", "transparent ones are allowed for shared memory")


def _pool(need: int, huge: str, backing: str, root: Path) -> Check:
    try:
        preflight.check(need, backing, _HUGE.get(huge, 0), root)
    except RegionError as error:
        return fail("CPU pool", *_found_and_advice(str(error), "; "))
    return ok("CPU pool", f"{human_bytes(need)} fit")


def _found_and_advice(line: str, between: str) -> tuple[str, str]:
    found, _, advice = line.partition(between)
    return found, advice
