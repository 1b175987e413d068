# SPDX-License-Identifier: Apache-2.0
"""A look at a root directory without touching it, before any memory is taken."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from vllm_tiered_offload.config.rules import ConfigError

Access = Callable[[Path, int], bool]
StatVfs = Callable[[Path], os.statvfs_result]


def root_problem(
    root: Path, name: str, mode: str, access: Access = os.access, statvfs: StatVfs = os.statvfs
) -> ConfigError | None:
    """Why `root` cannot be used in this `mode`, if so; `name` is the key that names it."""
    if mode == "read" and not root.exists():
        return ConfigError(
            name, f"{str(root)!r} does not exist (ENOENT); mode 'read' makes nothing"
        )
    nearest = root
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    what = repr(str(root))
    if nearest != root:
        what += f" cannot be made in {str(nearest)!r}, which"
    if not nearest.is_dir():
        return ConfigError(name, f"{what} is not a directory (ENOTDIR); give a directory")
    need = os.R_OK | os.X_OK | (os.W_OK if mode == "read_write" else 0)
    if not access(nearest, need):
        return ConfigError(name, f"{what} {_refusal(nearest, mode, statvfs)}")
    # proc, sysfs and their like have no blocks, and access() lets root write there. A file
    # system that only hides its size is given a chance: a directory that exists passes.
    if nearest != root and mode == "read_write" and not statvfs(nearest).f_blocks:
        return ConfigError(
            name, f"{what} is on a file system that keeps no files; give a directory on a disk"
        )
    return None


def _refusal(place: Path, mode: str, statvfs: StatVfs) -> str:
    if mode == "read_write" and statvfs(place).f_flag & os.ST_RDONLY:
        return (
            "is on a file system that is mounted read-only (EROFS); mount it writable, give "
            "another directory, or set mode to 'read'"
        )
    word = "writable" if mode == "read_write" else "readable"
    return (
        f"is not {word} for uid {os.geteuid()} ({errno.errorcode[errno.EACCES]}); "
        "change its owner or mode (in Kubernetes: fsGroup), or give another directory"
    )
