# SPDX-License-Identifier: Apache-2.0
"""What does not change while an engine runs: the start-up lines and vLLM's info labels."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.config import format_size

if TYPE_CHECKING:
    from vllm_tiered_offload.config import FsTierSettings
    from vllm_tiered_offload.fs_tier.identity import Identity

INFO_KEYS = ("root_dir", "max_bytes", "mode", "namespace", "survives_restart")


def info(settings: FsTierSettings, identity: Identity) -> dict[str, str | int | bool]:
    """The labels named by `INFO_KEYS`, for `vllm:kv_offload_config_info` (vLLM 0.33)."""
    return {
        "root_dir": ":".join(str(root) for root in settings.root_dir),
        "max_bytes": "none" if settings.max_bytes is None else settings.max_bytes,
        "mode": settings.mode,
        "namespace": identity.namespace.fingerprint,
        "survives_restart": not identity.namespace.private,
    }


def banner(label: str, facts: Mapping[str, Any], identity: Identity) -> list[str]:
    """One line on the namespace, then one per root; `facts` are `ChunkStore.describe()`."""
    namespace = identity.namespace
    kind = "private to this process" if namespace.private else "shared, survives restarts"
    lines = [
        f"disk tier {label}: namespace {namespace.fingerprint[:16]}, {kind}; chunks of "
        f"{format_size(facts['chunk_bytes'])}, I/O of up to {format_size(facts['io_bytes'])}"
    ]
    lines.extend(f"  {root['path']}: {', '.join(_of_root(root))}" for root in facts["roots"])
    return lines


def _of_root(root: Mapping[str, Any]) -> Iterator[str]:
    yield root["file_system"]
    why = root["read_only_because"]
    yield "read and write" if why is None else f"read only ({why})"
    why = root["buffered_because"] or "refused"
    yield "direct I/O" if root["direct_io"] else f"buffered I/O ({why})"
    yield f"{root['slots']} segments of {format_size(root['segment_bytes'])}"
    if root["writers"] > 1:
        yield f"{root['writers']} written at a time"
    if root["max_bytes"] is not None:
        yield f"at most {format_size(root['max_bytes'])}"
    if root["min_free_bytes"]:
        yield f"{format_size(root['min_free_bytes'])} left free"
    yield f"{root['recovered_chunks']} chunks found in {root['recovery_seconds']:.3f} s"


def log_banner(
    logger: logging.Logger, label: str, facts: Mapping[str, Any], identity: Identity
) -> None:
    """Write the banner, and what the operator should know about the identity."""
    logger.info("%s", "\n".join(banner(label, facts, identity)))
    for warning in identity.warnings:
        logger.warning("%s: %s", label, warning)
