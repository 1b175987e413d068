# SPDX-License-Identifier: Apache-2.0
"""Is there enough memory? Asked before the first page is taken.

Without this, too little is an OOM kill, a SIGBUS, or EFAULT somewhere deep.
Every shortage is one line: needed, available, which limit, what to change.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from vllm_tiered_offload.region import cgroup
from vllm_tiered_offload.region.settings import RegionError

_ROOT = Path("/")
# Seconds in which a dying engine's memory has to be seen coming back.
GROWTH_WINDOW = 2.0


class Shortage(RegionError):
    """Too little of something; `available` is how much there is, in bytes."""

    def __init__(self, available: int, reason: str) -> None:
        super().__init__(reason)
        self.available = available


def check_while_growing(
    check: Callable[[], None], need: int, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Run `check`; a shortage is final once it stops shrinking.

    The kernel takes a while to free what an engine killed just now held: a
    restart at once must not fail for it. Raises what `check` raises.
    """
    last = -need
    while True:
        try:
            return check()
        except Shortage as shortage:
            if shortage.available < last + need // 100:
                raise
            last = shortage.available
        sleep(GROWTH_WINDOW)


def size(count: int) -> str:
    """ "1.50 GiB (1610612736 bytes)"."""
    return f"{count / (1 << 30):.2f} GiB ({count} bytes)"


def check(need: int, backing: str, huge_bytes: int = 0, root: Path = _ROOT) -> None:
    """Raise `Shortage`, a `RegionError`, when `need` bytes cannot be had.

    Args:
        backing: "memfd" or "shm".
        huge_bytes: size of the reserved huge pages to use, 0 for normal pages.
        root: where /proc, /sys and /dev are.
    """
    if huge_bytes:
        _check_hugetlb(need, huge_bytes, root)  # set aside already: no other limit applies
        return
    available = _meminfo(root).get("MemAvailable")
    if available is not None and need > available:
        raise Shortage(
            available,
            f"the CPU pool needs {size(need)}, but this host has {size(available)} of free "
            "memory (MemAvailable); lower cpu_bytes_to_use",
        )
    for limit in cgroup.limits(root):
        if need > limit.available:
            raise Shortage(
                limit.available,
                f"the CPU pool needs {size(need)}, but the control group allows "
                f"{size(max(limit.available, 0))} more of {size(limit.limit)} ({limit.file}); "
                "lower cpu_bytes_to_use or raise the container's memory limit",
            )
    if backing == "shm":
        _check_shm(need, root / "dev/shm")


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes; {} where it cannot be read."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    values = {}
    for line in lines:
        name, _, rest = line.partition(":")
        number, *unit = rest.split() or ["0"]
        values[name] = int(number) * (1024 if unit else 1)
    return values


def _check_shm(need: int, shm: Path) -> None:
    try:
        status = os.statvfs(shm)
    except OSError as error:
        raise RegionError(
            f"region_backing 'shm' needs {shm}: {error.strerror}; use 'memfd'"
        ) from error
    available = status.f_bavail * status.f_frsize
    if need > available:
        raise Shortage(
            available,
            f"the CPU pool needs {size(need)}, but {shm} has {size(available)} free; use "
            "region_backing 'memfd', raise its size (docker --shm-size), or lower "
            "cpu_bytes_to_use",
        )


def _check_hugetlb(need: int, huge_bytes: int, root: Path) -> None:
    kib = huge_bytes // 1024
    pool = root / f"sys/kernel/mm/hugepages/hugepages-{kib}kB"
    try:
        values = {
            name: int((pool / name).read_text())
            for name in (
                "nr_hugepages",
                "free_hugepages",
                "resv_hugepages",
                "surplus_hugepages",
                "nr_overcommit_hugepages",
            )
        }
    except (OSError, ValueError):
        raise RegionError(
            f"huge_pages: this host has no pool of {kib} KiB pages ({pool} is missing); "
            "use 'auto' or 'off'"
        ) from None
    pages = -(-need // huge_bytes)
    spare = values["nr_overcommit_hugepages"] - values["surplus_hugepages"]
    free = values["free_hugepages"] - values["resv_hugepages"] + max(spare, 0)
    if pages <= free:
        return
    wanted = values["nr_hugepages"] + pages - free
    default = _meminfo(root).get("Hugepagesize") == huge_bytes
    command = (
        f"sysctl -w vm.nr_hugepages={wanted}"
        if default
        else f"echo {wanted} > {pool / 'nr_hugepages'}"
    )
    raise Shortage(
        free * huge_bytes,
        f"huge_pages: the CPU pool needs {pages} pages of {kib} KiB, but {free} are free in "
        f"the pool; {command}, or lower cpu_bytes_to_use, or use 'auto'",
    )


def locked_memory_note(need: int) -> str:
    """What to say where pinning `need` bytes for a GPU may fail; "" where it will not.

    Not an error: the CUDA driver pins without regard to this limit, and where a
    driver heeds it vLLM goes on with slower, unpinned transfers.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= need or os.geteuid() == 0:
        return ""
    return (
        f"pinning the CPU pool needs {size(need)} of locked memory, the limit is {size(soft)}: "
        "where the driver heeds it transfers stay unpinned and slower; ulimit -l unlimited "
        "(docker: --ulimit memlock=-1)"
    )
