# SPDX-License-Identifier: Apache-2.0
"""What our names resolve to on a vLLM that is not supported: the reason why."""

from __future__ import annotations

from typing import Any

from vllm_tiered_offload import compat


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise RuntimeError(f"{name} cannot be used: {compat.unsupported_reason()}")
