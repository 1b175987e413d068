# SPDX-License-Identifier: Apache-2.0
"""The start-up lines: what was opened, and who may share it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_tiered_offload.fs_tier.identity import Identity


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
