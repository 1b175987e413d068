# SPDX-License-Identifier: Apache-2.0
"""The JSON files of a root: read with distrust, replaced at once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

from vllm_tiered_offload.store.syscalls import NO_SPACE

LARGEST_JSON_BYTES = 16 << 20


def read_json(path: str) -> dict[str, Any]:
    """A small file of ours. Follows no link, and is stuck in neither a FIFO nor a device.

    Raises OSError, or ValueError for what is no JSON object.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        with open(fd, "rb", closefd=False) as file:
            fields = json.loads(file.read(LARGEST_JSON_BYTES))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    finally:
        os.close(fd)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields


def write_json(path: str, fields: Mapping[str, object]) -> None:
    """Replaces a file at once, mode 0600. Call under the root lock.

    On a full disk the old file is written over, in the block it has: a smaller bound is what
    may help, and must not fail for want of a block.
    """
    data = json.dumps(fields, indent=1, sort_keys=True, default=str).encode() + b"\n"
    fresh = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    try:
        _write(fresh, data, os.O_CREAT | os.O_EXCL)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        if error.errno not in NO_SPACE or not os.path.exists(path):
            raise
        _write(path, data.ljust(os.stat(path).st_size), 0)


def _write(path: str, data: bytes, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        os.fchmod(fd, 0o600)
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        os.fsync(fd)
    finally:
        os.close(fd)
