# SPDX-License-Identifier: Apache-2.0
"""Manifests found in a root, held against the namespace that is about to be opened.

The store files a namespace's manifest under its fingerprint. One that says something else
is a sign that the fingerprint cannot be trusted (edited, copied, a collision): to go on
could serve wrong bytes, so it is refused. One that says nothing (empty or torn by a power
loss) contradicts nothing.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from vllm_tiered_offload.fs_tier.fingerprint import IdentityError, check_manifest
from vllm_tiered_offload.store import Namespace

_LIMIT = 16 << 20


def check_stored_manifests(roots: Iterable[Path], namespace: Namespace) -> None:
    """Compare the manifest in each root, where there is one, with `namespace`.

    Raises:
        IdentityError: a manifest contradicts the fingerprint, or is no regular file. One
            line with its path.
    """
    for root in roots:
        path = root / "namespaces" / f"{namespace.fingerprint}.json"
        text = _read(path)
        try:
            stored = json.loads(text)["manifest"]
        except (ValueError, KeyError, TypeError):
            continue
        try:
            check_manifest(namespace.fingerprint, stored)
        except IdentityError as error:
            raise IdentityError(f"{path}: {error}") from None


def _read(path: Path) -> bytes:
    """The file's bytes, or none where there is no file."""
    try:
        # Neither follow a link nor wait for the other end of a FIFO.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise IdentityError(f"{path} is not a regular file; remove it") from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise IdentityError(f"{path} is not a regular file; remove it")
        if found.st_size > _LIMIT:
            raise IdentityError(f"{path} has {found.st_size} bytes; no manifest is that large")
        return os.read(descriptor, _LIMIT)
    finally:
        os.close(descriptor)
