# SPDX-License-Identifier: Apache-2.0
"""What does not change while an engine runs: the start-up lines and vLLM's info labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    """One line on the namespace, then one per root."""
    namespace = identity.namespace
    kind = "private to this process" if namespace.private else "shared, survives restarts"
    lines = [f"disk tier {label}: namespace {namespace.fingerprint[:16]}, {kind}"]
    rest = {key: value for key, value in facts.items() if key != "roots"}
    if rest:
        lines.append("  " + _facts(rest))
    lines.extend("  " + _facts(root) for root in facts.get("roots", ()))
    return lines


def _facts(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_show(v)}" for name, v in facts.items())


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def log_banner(
    logger: logging.Logger, label: str, facts: Mapping[str, Any], identity: Identity
) -> None:
    """Write the banner, and what the operator should know about the identity."""
    logger.info("%s", "\n".join(banner(label, facts, identity)))
    for warning in identity.warnings:
        logger.warning("%s: %s", label, warning)
