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

LARGEST_JSON_BYTES = 16 << 20


def read_json(path: str) -> dict[str, Any]:
    """A small file of ours. Follows no link, and is stuck in neither a FIFO nor a device.

    Raises OSError, or ValueError for what is no JSON object.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        try:
            fields = json.loads(file.read(LARGEST_JSON_BYTES))
        except RecursionError:
            raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields


def write_json(path: str, fields: Mapping[str, object]) -> None:
    """Replaces a file at once, mode 0600. Call under the root lock."""
    fresh = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        data = json.dumps(fields, indent=1, sort_keys=True, default=str).encode() + b"\n"
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), fresh)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(fresh, path)
