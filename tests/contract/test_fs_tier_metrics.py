# SPDX-License-Identifier: Apache-2.0
"""What reaches vLLM's metrics: declared, of the right type and number of labels, and true."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)

from tests.support.tier import PAGE, MemoryStore, make_config, make_spec
from vllm_tiered_offload.fs_tier import metrics, wiring
from vllm_tiered_offload.fs_tier.manager import ODirectFsTier
from vllm_tiered_offload.fs_tier.metrics import PREFIX, TierMetrics, metric_definitions
from vllm_tiered_offload.store import Namespace, StoreSettings

CHUNK = 2 * PAGE
PADDING = 512


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> MemoryStore:
    memory = memoryview(bytearray(4 * CHUNK))
    settings = StoreSettings(root_dirs=(Path("/kv"),))
    return MemoryStore(settings, Namespace("0" * 32), memory, CHUNK)


@pytest.fixture
def tier(store: MemoryStore, clock: Clock) -> TierMetrics:
    return TierMetrics("1:odirect_fs", store.stats, CHUNK, PADDING, clock)


def values(stats: OffloadingConnectorStats) -> dict[str, dict[tuple[str, ...], Any]]:
    return dict(stats.data["data"])


def value(stats: OffloadingConnectorStats, name: str, *labels: str) -> Any:
    return values(stats)[PREFIX + name][("1:odirect_fs", *labels)]


def test_the_first_report_has_every_series_and_only_declared_ones(tier: TierMetrics) -> None:
    definitions = metric_definitions()
    first = values(tier.take())
    assert set(first) | {PREFIX + "failed_chunks"} == set(definitions)
    for name, series in first.items():
        for labels, number in series.items():
            assert len(labels) == len(definitions[name].labelnames), name
            assert all(type(label) is str for label in labels)
            assert type(number) in (int, float), f"{name}: {type(number)}"


def test_names_are_vllms_and_say_what_they_are() -> None:
    for name, metadata in metric_definitions().items():
        assert name.startswith("vllm:kv_offload_odirect_")
        assert metadata.documentation
        assert metadata.labelnames[0] == "tier"


def test_definitions_come_through_the_tier_class() -> None:
    assert (
        ODirectFsTier.build_metric_definitions({"type": "odirect_fs"}) == metric_definitions()
    )


def test_counters_are_differences_and_gauges_are_not(
    tier: TierMetrics, store: MemoryStore
) -> None:
    store.fields = {"stored_bytes": 10, "pending_jobs": 3}
    first = tier.take()
    assert value(first, "stored_bytes") == 10
    assert value(first, "queue_jobs") == 3
    second = tier.take()
    assert PREFIX + "stored_bytes" not in values(second)  # nothing to add
    assert value(second, "queue_jobs") == 3
    store.fields = {"stored_bytes": 25, "pending_jobs": 0}
    third = tier.take()
    assert value(third, "stored_bytes") == 15
    assert value(third, "queue_jobs") == 0


def test_reports_add_up_as_vllm_adds_them(tier: TierMetrics, store: MemoryStore) -> None:
    total = OffloadingConnectorStats()
    for stored in (5, 5, 17, 40):
        store.fields = {"stored_bytes": stored, "dropped_chunks": {"queue": stored // 5}}
        total.aggregate(tier.take())
    assert value(total, "stored_bytes") == 40
    assert value(total, "dropped_chunks", "queue") == 8


def test_io_errors_carry_direction_and_errno(tier: TierMetrics, store: MemoryStore) -> None:
    first = tier.take()
    assert value(first, "io_errors", "/kv", "read", "EIO") == 0
    assert value(first, "io_errors", "/kv", "write", "ENOSPC") == 0
    store.root_fields = {"counters": {"io_errors.read.EIO": 2, "io_errors.write.ENODEV": 1}}
    second = tier.take()
    assert value(second, "io_errors", "/kv", "read", "EIO") == 2
    assert value(second, "io_errors", "/kv", "write", "ENODEV") == 1


def test_bytes_of_moved_and_damaged_chunks_come_from_the_stores_counters(
    tier: TierMetrics, store: MemoryStore
) -> None:
    store.root_fields = {"counters": {"copied_chunks": 3, "failed.corrupt": 2}}
    stats = tier.take()
    assert value(stats, "second_chance_bytes", "/kv") == 3 * CHUNK
    assert value(stats, "checksum_failures", "/kv") == 2


def test_padding_counts_for_each_chunk_on_disk(tier: TierMetrics, store: MemoryStore) -> None:
    store.root_fields = {"chunks": 7}
    assert value(tier.take(), "pad_bytes", "/kv") == 7 * PADDING


def test_what_the_tier_drops_itself_has_a_reason(tier: TierMetrics) -> None:
    tier.store_dropped("reset", 3)
    tier.store_dropped("off", 2)
    stats = tier.take()
    assert value(stats, "dropped_chunks", "reset") == 3
    assert value(stats, "dropped_chunks", "off") == 2


# --- stores but never hits -----------------------------------------------------------------


def test_much_stored_for_long_and_never_found_is_said_once(
    tier: TierMetrics, store: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *args: said.append(text % args))
    store.fields = {"stored_chunks": 5000}
    assert value(tier.take(), "stores_never_hit") == 0
    clock.now += 3600
    for _ in range(3):
        assert value(tier.take(), "stores_never_hit") == 1
    assert len(said) == 1
    assert "5000 chunks" in said[0]
    tier.chunks_requested(1)
    assert value(tier.take(), "stores_never_hit") == 0


def test_a_young_or_little_used_cache_is_not_accused(
    tier: TierMetrics, store: MemoryStore, clock: Clock
) -> None:
    store.fields = {"stored_chunks": 10}
    tier.take()
    clock.now += 3600
    assert value(tier.take(), "stores_never_hit") == 0
    store.fields = {"stored_chunks": 5000}
    assert value(tier.take(), "stores_never_hit") == 0
    clock.now += 60
    assert value(tier.take(), "stores_never_hit") == 0


# --- label and padding from the spec -------------------------------------------------------


def test_the_label_is_the_one_of_vllms_own_metrics() -> None:
    tiers = [{"type": "fs", "root_dir": "/a"}, {"type": "odirect_fs", "root_dir": "/b"}]
    spec = make_spec(make_config(tiers))
    assert wiring.tier_label("odirect_fs", {"root_dir": "/b"}, spec) == "2:odirect_fs"
    assert wiring.tier_label("odirect_fs", {"root_dir": "/c"}, spec) == "odirect_fs"


@pytest.mark.parametrize(
    ("replicated", "world_size", "padding"), [(False, 2, PAGE), (True, 2, 2 * PAGE)]
)
def test_padding_is_what_no_worker_fills(
    replicated: bool, world_size: int, padding: int
) -> None:
    spec = make_spec(make_config(page=PAGE, world_size=world_size))
    spec.replicated_layout = replicated
    assert wiring.padding_bytes(spec, 3 * PAGE) == padding


def test_a_spec_that_does_not_say_has_no_padding() -> None:
    assert wiring.padding_bytes(object(), PAGE) == 0


def test_logging_goes_to_vllms_tree() -> None:
    assert isinstance(metrics.logger, logging.Logger)
    assert metrics.logger.name.startswith("vllm.")
