# SPDX-License-Identifier: Apache-2.0
"""The only file that knows differences between vLLM versions.

Differences are found by looking at names and signatures, never by comparing
version strings: nightlies and vendor builds carry versions that say nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SUPPORTED_VLLM = "0.30 to 0.33"

_FACTORIES = {
    "connector": (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
    ),
    "spec": ("vllm.v1.kv_offload.factory", "OffloadingSpecFactory"),
    "tier": ("vllm.v1.kv_offload.tiering.factory", "SecondaryTierFactory"),
}
# Each came with the vLLM named, or was there before; all are cheap to look up
# once the factories are imported.
_NEEDED = (
    ("vllm.v1.kv_offload.config", "OffloadingConfig"),  # 0.26
    ("vllm.v1.kv_offload.base", "OffloadPolicy.CHUNK_LEVEL"),  # 0.30
    ("vllm.v1.kv_offload.base", "LookupResult.HIT_PENDING"),
    ("vllm.v1.kv_offload.tiering.base", "TransferJob"),
)


@functools.cache
def _keywords(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset(parameters), takes_any


def call(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `function` with those of `kwargs` that its signature knows.

    vLLM 0.33 added keywords (`info`, `tier_poll_interval_s`) that 0.30 to 0.32
    refuse; both sides are served by one call site.
    """
    names, takes_any = _keywords(function)
    known = kwargs if takes_any else {k: v for k, v in kwargs.items() if k in names}
    return function(*args, **known)


def factories() -> dict[str, Any]:
    """vLLM's factories by kind, without those that this vLLM does not have."""
    found = {}
    for kind, (module, name) in _FACTORIES.items():
        try:
            found[kind] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return found


@functools.cache
def unsupported_reason() -> str | None:
    """One line that says why this vLLM cannot be used, or None."""
    for module, path in _NEEDED:
        try:
            functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            return f"this vLLM has no {module}.{path}; supported is vLLM {SUPPORTED_VLLM}"
    return None
