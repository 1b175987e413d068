# SPDX-License-Identifier: Apache-2.0
"""Kernel, processors and limits of this process."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from vllm_tiered_offload.cli.checks import Check, fail, ok, warn

SYS = Path("/sys")
# madvise(MADV_POPULATE_WRITE): the pool is pre-faulted by one call a thread.
_POPULATE = (5, 14)
# statx(STATX_DIOALIGN): what direct I/O wants is asked, not guessed.
_DIOALIGN = (6, 1)
# Descriptors kept open for reading, with room for vLLM's own.
_OPEN_FILES = 1024


def check_machine(sys: Path = SYS, release: str | None = None) -> Iterator[Check]:
    yield _kernel(release or platform.release())
    yield _processors(sys)
    yield _open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _kernel(release: str) -> Check:
    if platform.system() != "Linux":
        return fail(
            "kernel", platform.system(), "run it on Linux; memfd and O_DIRECT are needed"
        )
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < _POPULATE:
        return warn(
            "kernel",
            f"Linux {release}",
            "works; 5.14 and newer pre-fault the pool faster (MADV_POPULATE_WRITE)",
        )
    if version < _DIOALIGN:
        return ok("kernel", f"Linux {release}; direct I/O is probed (6.1 and newer tell)")
    return ok("kernel", f"Linux {release}")


def _processors(sys: Path) -> Check:
    usable = len(os.sched_getaffinity(0))
    nodes = len(list((sys / "devices/system/node").glob("node[0-9]*")))
    found = f"{usable} usable, {max(nodes, 1)} NUMA node(s)"
    if nodes > 1:
        return warn(
            "processors",
            found,
            "run each engine on the node of its GPU (numactl --cpunodebind=N --membind=N), "
            "else half of the copies cross the link between them",
        )
    return ok("processors", found)


def _open_files(limit: int) -> Check:
    if 0 <= limit < _OPEN_FILES:
        return warn("open files", f"limit {limit}", f"raise it: ulimit -n {_OPEN_FILES}")
    return ok("open files", f"limit {'none' if limit < 0 else limit}")
