# SPDX-License-Identifier: Apache-2.0
"""Every series that `top` reads is one that vLLM or the tier declares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_tiered_offload.cli.monitoring.scrape import Labels, Sample
from vllm_tiered_offload.cli.monitoring.summary import summarize

loggers = pytest.importorskip("vllm.v1.metrics.loggers")
offloading = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
)
tiering = pytest.importorskip("vllm.v1.kv_offload.tiering.spec")
tier = pytest.importorskip("vllm_tiered_offload.fs_tier.metrics")


class Asked(Sample):
    """A sample that remembers what it was asked for, and has one root."""

    names: set[str] = set()

    def total(self, name: str, **labels: str) -> float:
        self.names.add(name)
        return super().total(name, **labels)

    def by(self, name: str, label: str) -> dict[str, float]:
        self.names.add(name)
        return super().by(name, label)

    def values(self, name: str, label: str) -> list[str]:
        self.names.add(name)
        return super().values(name, label)


def declared() -> set[str]:
    """Names as Prometheus shows them: a counter ends in `_total`."""
    names = set(tier.metric_definitions())
    names |= set(tiering.TieringOffloadingSpec.build_metric_definitions({}))
    for module in (loggers, offloading):
        names |= set(re.findall(r'"(vllm:\w+)"', Path(module.__file__).read_text()))
    return names | {f"{name}_total" for name in names}


def test_names():
    one: tuple[Labels, float] = ({"root": "/a", "tier": "1:odirect_fs"}, 1.0)
    series = {
        "vllm:kv_offload_odirect_resident_bytes": [one],
        "vllm:kv_offload_tiering_chunk_queries_total": [one],
    }
    summarize(Asked(0.0, series), Asked(1.0, series))
    assert len(Asked.names) > 20
    assert Asked.names <= declared()
