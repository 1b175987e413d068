# SPDX-License-Identifier: Apache-2.0
"""What a user may choose about the region, and the error every part of it raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backing = Literal["memfd", "shm"]
HugePages = Literal["auto", "off", "2MB", "1GB"]

HUGE_PAGE_BYTES = {"2MB": 2 << 20, "1GB": 1 << 30}


class RegionError(RuntimeError):
    """The region cannot be made or joined; one line that says why and what to change."""


@dataclass(frozen=True, slots=True)
class RegionSettings:
    """How the region is backed.

    Args:
        backing: "memfd" (anonymous, freed by the kernel with its last user) or
            "shm" (a file in /dev/shm, for kernels or sandboxes without memfd).
        huge_pages: "auto" asks for transparent huge pages, "off" does not,
            "2MB" and "1GB" take pages reserved in the hugetlb pool.
        prefault: take all pages at start instead of at first use.
        join_timeout: seconds to wait for a process that does not answer, and at most for
            those that have not come.
    """

    backing: Backing = "memfd"
    huge_pages: HugePages = "auto"
    prefault: bool = True
    join_timeout: float = 600.0

    @property
    def explicit_huge_bytes(self) -> int:
        """Size of a reserved huge page in bytes, 0 when none are asked for."""
        return HUGE_PAGE_BYTES.get(self.huge_pages, 0)
