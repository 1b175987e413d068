# SPDX-License-Identifier: Apache-2.0
"""The Prometheus series of a server with our spec and tier, by name, with their labels."""

from __future__ import annotations

import re
from pathlib import Path

import vllm.v1.metrics.loggers
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    get_connector_metric_definitions,
)
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingHistogramMetadata
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm_tiered_offload import pool_metrics
from vllm_tiered_offload.fs_tier.metrics import metric_definitions

# What Prometheus and vLLM put on every series.
COMMON_LABELS = {"instance", "job", "engine", "model_name", "le"}
BY_SOURCE = "vllm:prompt_tokens_cached_by_source"


def series() -> dict[str, set[str]]:
    """Every series of a server with our tier, with its labels."""
    definitions = {
        **TieringOffloadingSpec.build_metric_definitions({}),
        **get_connector_metric_definitions(),
        **metric_definitions(),
        **pool_metrics.metric_definitions(),
    }
    found: dict[str, set[str]] = {}
    for name, metadata in definitions.items():
        labels = set(metadata.labelnames) | COMMON_LABELS
        if isinstance(metadata, OffloadingCounterMetadata):
            found[f"{name}_total"] = labels
        elif isinstance(metadata, OffloadingHistogramMetadata):
            found.update({f"{name}_{part}": labels for part in ("bucket", "sum", "count")})
        else:
            found[name] = labels
    source = Path(vllm.v1.metrics.loggers.__file__).read_text()
    for name in re.findall(r'"(vllm:\w+)"', source):
        labels = COMMON_LABELS | ({"source"} if name == BY_SOURCE else set())
        found.update({f"{name}{part}": labels for part in ("", "_total", "_bucket")})
    if f"{BY_SOURCE}_total" not in found:  # before 0.32
        found[f"{BY_SOURCE}_total"] = {*COMMON_LABELS, "source"}
    return found
