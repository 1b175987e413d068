# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: registers our four names.

vLLM calls `register()` in every one of its processes (API servers, engine core,
workers, model inspection), so it imports nothing heavy, may run any number of
times and never raises: an exception here would kill a vLLM that does not even
use the plugin.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_tiered_offload import compat

CONNECTOR = "TieredOffloadingConnector"
CPU_SPEC = "AlignedCPUOffloadingSpec"
TIERING_SPEC = "AlignedTieringOffloadingSpec"
TIER = "odirect_fs"

_PACKAGE = "vllm_tiered_offload"
# (factory, registering method, name, module, class)
_REGISTRATIONS = (
    ("connector", "register_connector", CONNECTOR, f"{_PACKAGE}.connector", CONNECTOR),
    ("spec", "register_spec", CPU_SPEC, f"{_PACKAGE}.spec.cpu", CPU_SPEC),
    ("spec", "register_spec", TIERING_SPEC, f"{_PACKAGE}.spec.tiering", TIERING_SPEC),
    ("tier", "register_tier", TIER, f"{_PACKAGE}.fs_tier.manager", "ODirectFsTier"),
)

logger = logging.getLogger("vllm.tiered_offload.plugin")


def register() -> None:
    """Register the connector, the two specs and the tier with vLLM's factories.

    Idempotent; imports of the classes themselves happen when vLLM selects a
    name. Where this vLLM is not supported, the names are registered all the
    same, but selecting one fails with the reason.
    """
    try:
        factories = compat.factories()
        reason = compat.unsupported_reason()
        if reason is not None:
            logger.warning("vllm-tiered-offload is inactive: %s", reason)
        for kind, method, name, module, class_name in _REGISTRATIONS:
            if kind in factories:
                target = module if reason is None else f"{_PACKAGE}.unsupported"
                _register_once(factories[kind], method, name, target, class_name)
    except Exception as error:
        logger.warning("vllm-tiered-offload is inactive: %s: %s", type(error).__name__, error)


def _register_once(factory: Any, method: str, name: str, module: str, class_name: str) -> None:
    # The factories raise on a name they know, and vLLM may load plugins more
    # than once in one process.
    if name not in factory._registry:
        getattr(factory, method)(name, module, class_name)
