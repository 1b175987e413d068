# SPDX-License-Identifier: Apache-2.0
"""Huge pages: asking for them, and finding out what the kernel really gave."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tiered_offload.region import libc
from vllm_tiered_offload.region.settings import RegionSettings

if TYPE_CHECKING:
    from vllm_tiered_offload.region.mapping import Mapping

TRANSPARENT_BYTES = 2 << 20  # what x86-64 and 4 KiB arm64 map at once
_SYS = Path("/sys/kernel/mm/transparent_hugepage")


def granule(settings: RegionSettings, page: int) -> int:
    """Bytes that are best taken as one: the huge page aimed at, else the page."""
    if settings.huge_pages == "off":
        return page
    return settings.explicit_huge_bytes or TRANSPARENT_BYTES


def advise(mapping: Mapping, settings: RegionSettings) -> None:
    """Tell the kernel the user's wish; only what it maps afterwards is huge."""
    advice = libc.MADV_NOHUGEPAGE if settings.huge_pages == "off" else libc.MADV_HUGEPAGE
    if not settings.explicit_huge_bytes:
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            libc.advise(mapping.address, mapping.length, advice)


def mapped_huge_bytes(address: int, length: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Bytes of the mapping that really are huge pages: `madvise` succeeds either way.

    Transparent ones only; see "ShmemPmdMapped" in proc(5).
    """
    found = 0
    inside = False
    with contextlib.suppress(OSError), smaps.open() as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                low, _, high = name.partition("-")
                inside = address <= int(low, 16) and int(high, 16) <= address + length
            elif inside and name in ("ShmemPmdMapped:", "FilePmdMapped:"):
                found += int(rest.split()[0]) * 1024
    return found


def _chosen(text: str) -> str:
    """The word in brackets: "always [madvise] never" -> "madvise"."""
    return text.partition("[")[2].partition("]")[0]


def hint(backing: str, sys: Path = _SYS) -> str:
    """Which setting keeps transparent huge pages away; "" when none is to blame."""
    if backing == "shm":
        return "mount -o remount,huge=advise /dev/shm"
    try:
        setting = _chosen((sys / "shmem_enabled").read_text())
    except OSError:
        return "this kernel has no transparent huge pages for shared memory"
    if setting in ("never", "deny"):
        return f"echo advise > {sys / 'shmem_enabled'} (is {setting})"
    return ""
