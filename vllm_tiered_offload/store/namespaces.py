# SPDX-License-Identifier: Apache-2.0
"""Manifests: what a fingerprint stands for, and whether a private one's owner lives."""

from __future__ import annotations

import contextlib
import logging
import os

from vllm_tiered_offload.store import locks
from vllm_tiered_offload.store.api import Namespace
from vllm_tiered_offload.store.root import Root
from vllm_tiered_offload.store.small_files import read_json, write_json
from vllm_tiered_offload.store.syscalls import NO_SPACE, explain

logger = logging.getLogger("vllm.tiered_offload.store")


def manifest_path(root: Root, fingerprint: str) -> str:
    return f"{root.namespaces_dir}/{fingerprint}.json"


def enter(root: Root, namespace: Namespace) -> int | None:
    """Writes the manifest; a private namespace is locked until ``locks.close(result)``.

    Raises OSError. Two processes of one private namespace both hold it.
    """
    path = manifest_path(root, namespace.fingerprint)
    with root.lock.hold():
        if not os.path.exists(path):
            _describe(path, namespace)
        if not namespace.private:
            return None
        fd = locks.open_kept(lambda: _open(path))
        if root.lock.works:
            try:
                # Who asks for a namespace's owner holds its lock for a moment.
                locks.wait_lock(fd, path, shared=True)
            except OSError:
                locks.close(fd)
                raise
        return fd


def _describe(path: str, namespace: Namespace) -> None:
    """A full disk keeps nobody from a namespace that needs no owner: it can be read still."""
    try:
        fields = {"private": namespace.private, "manifest": dict(namespace.manifest)}
        write_json(path, fields)
    except OSError as error:
        if namespace.private or error.errno not in NO_SPACE:
            raise
        logger.warning("%s was not written: %s", path, explain(error))


def is_alive(root: Root, fingerprint: str) -> bool:
    """Whether some process holds a private namespace. No manifest: no owner.

    Of two that ask at once one is told yes. Where that matters, ask under the root lock.
    """
    try:
        fd = locks.open_kept(lambda: _open(manifest_path(root, fingerprint)))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # nobody can tell; the careful answer
    try:
        return root.lock.works and not locks.try_lock(fd)
    except OSError:
        return True
    finally:
        locks.close(fd)  # a child must not take the lock that asked for the owner's


def remove_dead(root: Root, fingerprints_in_use: set[str]) -> int:
    """Deletes manifests of private namespaces that have neither an owner nor a segment."""
    removed = 0
    with root.lock.hold():
        for name in os.listdir(root.namespaces_dir):
            fingerprint, _, suffix = name.partition(".")
            if suffix != "json" or fingerprint in fingerprints_in_use:
                continue
            if _is_private(f"{root.namespaces_dir}/{name}") and not is_alive(root, fingerprint):
                with contextlib.suppress(OSError):
                    os.unlink(f"{root.namespaces_dir}/{name}")
                    removed += 1
    return removed


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def _is_private(path: str) -> bool:
    try:
        return bool(read_json(path)["private"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
