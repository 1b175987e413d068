# SPDX-License-Identifier: Apache-2.0
"""The keys a user may set, checked before anything is allocated. Knows no vLLM."""

from vllm_tiered_offload.config.fs_tier import FsTierSettings, is_fs_tier
from vllm_tiered_offload.config.rules import ConfigError, format_size, parse_size
from vllm_tiered_offload.config.spec import SpecSettings
from vllm_tiered_offload.config.transfer import Transfer, read_transfer

__all__ = [
    "ConfigError",
    "FsTierSettings",
    "SpecSettings",
    "Transfer",
    "format_size",
    "is_fs_tier",
    "parse_size",
    "read_transfer",
]
