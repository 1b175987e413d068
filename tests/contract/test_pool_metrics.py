# SPDX-License-Identifier: Apache-2.0
"""The pool's series: what the manager reports, and what vLLM's front ends make of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    OffloadPromMetrics,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.support.tiering import ROW_BYTES, Bench, Prompt, chain
from vllm_tiered_offload import plugin
from vllm_tiered_offload.manager import PinnedTieringManager, PinSettings
from vllm_tiered_offload.pool_metrics import PREFIX, metric_definitions
from vllm_tiered_offload.spec.cpu import AlignedCPUOffloadingSpec
from vllm_tiered_offload.spec.tiering import AlignedTieringOffloadingSpec
from vllm_tiered_offload.waits import GONE, IN_TIME, OUT_OF_PATIENCE, OUTCOMES

POOL = 64
DEADLINE = 30.0
PATIENCE = 5.0
PINS = PinSettings(max_share=1.0, store_headroom=0.0, patience=PATIENCE, deadline=DEADLINE)


class Seen:
    """What was reported so far, added up as vLLM adds it up."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.total = OffloadingConnectorStats()

    def now(self) -> dict[str, dict[tuple[str, ...], Any]]:
        self.total.aggregate(self.bench.manager.get_stats())
        return dict(self.total.data["data"])

    def value(self, name: str, *labels: str) -> Any:
        return self.now()[PREFIX + name][labels]

    def waits(self) -> dict[str, int]:
        now = self.now()[PREFIX + "waits"]
        return {outcome: now[outcome,] for outcome in OUTCOMES}


def crowded(**options: Any) -> tuple[Bench, list[Prompt]]:
    """Two prompts that do not fit together; the disk ends no job by itself."""
    ours = Bench(POOL, PinnedTieringManager, pins=PINS, **options)
    prompts = [ours.request(str(i), chain(i, 40)) for i in range(2)]
    for prompt in prompts:
        ours.stored(prompt.groups[0])
    for tier in ours.tiers:
        tier.slow = True
    return ours, prompts


@pytest.fixture
def waiting() -> tuple[Bench, list[Prompt], Seen]:
    """The first prompt is being read, the second waits for its room."""
    ours, prompts = crowded()
    seen = Seen(ours)
    ours.step(*prompts)
    assert seen.value("waiting_requests") == 1
    return ours, prompts, seen


# --- what is declared and reported ---


def test_the_first_report_has_every_series_at_0_and_only_declared_ones() -> None:
    ours = Bench(POOL, PinnedTieringManager, pins=PINS)
    definitions = metric_definitions()
    first = {
        name: series
        for name, series in ours.manager.get_stats().data["data"].items()
        if name.startswith(PREFIX)
    }
    assert set(first) == set(definitions)
    for name, series in first.items():
        expected = [(outcome,) for outcome in OUTCOMES] if "_wait" in name else [()]
        if not definitions[name].labelnames:
            expected = [()]
        assert list(series) == expected, name
        for value in series.values():
            assert type(value) in (int, float), name
            assert value == (POOL * ROW_BYTES if "limit" in name else 0), name


def test_without_any_tier_the_pool_is_reported_all_the_same() -> None:
    ours = Bench(POOL, PinnedTieringManager, pins=PINS)
    manager = PinnedTieringManager(ours.pool, [], pins=PINS)
    assert set(metric_definitions()) <= set(manager.get_stats().data["data"])


def test_nothing_is_reported_after_the_shutdown() -> None:
    ours = Bench(POOL, PinnedTieringManager, pins=PINS)
    ours.manager.shutdown()
    assert ours.manager.get_stats() is None


def test_only_the_spec_whose_manager_pins_declares_them() -> None:
    ours = AlignedTieringOffloadingSpec.build_metric_definitions({})
    assert metric_definitions().items() <= ours.items()
    for spec in (TieringOffloadingSpec, AlignedCPUOffloadingSpec):
        assert not set(metric_definitions()) & set(spec.build_metric_definitions({}))


def test_the_limit_is_what_pins_and_headroom_leave() -> None:
    pins = PinSettings(max_share=0.75, store_headroom=0.5)
    ours = Bench(POOL, PinnedTieringManager, pins=pins)
    assert Seen(ours).value("promotion_limit_bytes") == POOL // 2 * ROW_BYTES


# --- pins ---


def test_bytes_are_promoting_then_pinned_then_nobodys() -> None:
    ours, (prompt, _) = crowded()
    seen = Seen(ours)
    ours.step(prompt)
    assert seen.value("promoting_bytes") == 40 * ROW_BYTES
    assert seen.value("pinned_chunks") == 0
    ours.tier.run()
    ours.end_step()
    assert seen.value("promoting_bytes") == 0
    assert seen.value("pinned_chunks") == 40
    assert seen.value("pinned_bytes") == 40 * ROW_BYTES
    ours.step(prompt)
    assert prompt.hits == 40
    assert seen.value("pinned_bytes") == 0
    assert seen.value("pins_expired") == 0


def test_a_chunk_pinned_for_two_requests_is_one_chunk() -> None:
    ours = Bench(POOL, PinnedTieringManager, pins=PINS)
    prompts = [ours.request(name, chain(1, 20)) for name in "ab"]
    ours.stored(prompts[0].groups[0])
    ours.step(*prompts)
    ours.step(prompts[1])
    assert Seen(ours).value("pinned_chunks") <= 20


def test_several_tiers_are_one_pool() -> None:
    ours, (prompt, _) = crowded(tiers=3)
    ours.stored(prompt.groups[0], tier=2)
    ours.step(prompt)
    for tier in ours.tiers:
        tier.run()
    ours.end_step()
    seen = Seen(ours)
    assert seen.value("pinned_bytes") == 40 * ROW_BYTES
    assert [list(seen.now()[name]) for name in (PREFIX + "pinned_bytes",)] == [[()]]


def test_pins_that_end_at_the_deadline_are_counted_by_request() -> None:
    ours, (prompt, _) = crowded()
    seen = Seen(ours)
    ours.step(prompt)
    ours.tier.run()
    ours.end_step()
    ours.clock.now += DEADLINE + 1
    ours.end_step()
    assert seen.value("pins_expired") == 1
    assert seen.value("pinned_chunks") == 0
    ours.end_step()
    assert seen.value("pins_expired") == 1


def test_reads_past_the_deadline_are_overdue_until_they_end() -> None:
    ours, (prompt, _) = crowded()
    seen = Seen(ours)
    ours.step(prompt)
    ours.clock.now += DEADLINE + 1
    ours.end_step()
    assert seen.value("overdue_bytes") == seen.value("promoting_bytes") == 40 * ROW_BYTES
    ours.tier.run()
    ours.end_step()
    ours.end_step()
    assert seen.value("overdue_bytes") == seen.value("promoting_bytes") == 0


# --- waits ---


def test_a_wait_that_gets_room_ended_in_time(waiting: tuple[Bench, list[Prompt], Seen]) -> None:
    ours, (first, second), seen = waiting
    ours.clock.now += 2.0
    ours.tier.run()
    ours.step(first, second)  # the first starts, which frees what it held
    ours.step(second)
    assert seen.value("waiting_requests") == 0
    assert seen.waits() == {IN_TIME: 1, OUT_OF_PATIENCE: 0, GONE: 0}
    assert seen.value("wait_seconds", IN_TIME) == pytest.approx(2.0)
    ours.tier.run()
    assert ours.run(second) == 40
    assert seen.waits()[IN_TIME] == 1


def test_a_wait_that_lasts_too_long_takes_what_is_there(
    waiting: tuple[Bench, list[Prompt], Seen],
) -> None:
    ours, (_, second), seen = waiting
    ours.clock.now += PATIENCE - 0.1
    ours.step(second)
    assert seen.value("waiting_requests") == 1
    ours.clock.now += 0.2
    ours.step(second)
    assert seen.value("waiting_requests") == 0
    assert seen.waits() == {IN_TIME: 0, OUT_OF_PATIENCE: 1, GONE: 0}
    assert seen.value("promoting_bytes") == POOL * ROW_BYTES
    assert seen.value("wait_seconds", OUT_OF_PATIENCE) == pytest.approx(PATIENCE + 0.1)


def test_a_wait_for_which_there_is_nothing_to_take_ran_out_too() -> None:
    ours, prompts = crowded()
    seen = Seen(ours)
    filler = ours.request("filler", chain(9, POOL))
    ours.stored(filler.groups[0])
    ours.step(filler)
    ours.step(prompts[0])
    assert seen.value("waiting_requests") == 1
    ours.clock.now += PATIENCE + 1
    ours.step(prompts[0])
    assert prompts[0].hits == 0
    assert seen.value("waiting_requests") == 0
    assert seen.waits() == {IN_TIME: 0, OUT_OF_PATIENCE: 1, GONE: 0}


def test_a_wait_that_gets_most_of_what_it_wants_ended_in_time() -> None:
    ours, (first, _) = crowded()
    seen = Seen(ours)
    large = ours.request("large", chain(8, 60))
    small = ours.request("small", chain(9, 10))
    ours.stored(large.groups[0] + small.groups[0])
    ours.step(first, large)
    ours.tier.run()
    ours.step(first, small)
    ours.step(large)
    assert seen.value("promoting_bytes") == POOL * ROW_BYTES
    assert seen.value("waiting_requests") == 0
    assert seen.waits() == {IN_TIME: 1, OUT_OF_PATIENCE: 0, GONE: 0}


@pytest.mark.parametrize("end", ["finish", "reset"])
def test_who_goes_while_waiting_is_gone(
    waiting: tuple[Bench, list[Prompt], Seen], end: str
) -> None:
    ours, (first, second), seen = waiting
    if end == "finish":
        ours.finish(second)
    else:
        ours.manager.reset_cache()
    assert seen.value("waiting_requests") == 0
    assert seen.waits() == {IN_TIME: 0, OUT_OF_PATIENCE: 0, GONE: 1}
    for prompt in (first,) if end == "finish" else (first, second):
        ours.finish(prompt)
    ours.assert_idle()


def test_without_patience_nobody_waits() -> None:
    ours, prompts = crowded()
    ours.manager = PinnedTieringManager(
        ours.pool, list(ours.tiers), pins=PinSettings(patience=0.0), clock=ours.clock
    )
    for prompt in prompts:
        ours.manager.on_new_request(prompt.context)
    seen = Seen(ours)
    ours.step(*prompts)
    assert seen.value("waiting_requests") == 0
    assert not any(seen.waits().values())


# --- through vLLM's front end ---


class FrontEnd:
    """One API server: vLLM's own metrics of the connector over a registry of its own."""

    def __init__(self) -> None:
        extra = {"spec_name": plugin.TIERING_SPEC, "cpu_bytes_to_use": 1 << 30}
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        self.registry = CollectorRegistry()
        self.metrics = OffloadPromMetrics(
            SimpleNamespace(kv_transfer_config=transfer),
            {
                kind: functools.partial(kind, registry=self.registry)
                for kind in (Gauge, Counter, Histogram)
            },
            ["model_name", "engine"],
            {0: ["m", "0"]},
        )

    def scrape(self, name: str, **labels: str) -> float | None:
        labels |= {"model_name": "m", "engine": "0"}
        return self.registry.get_sample_value(PREFIX + name, labels)


@pytest.fixture
def front_ends() -> Iterator[list[FrontEnd]]:
    plugin.register()
    return [FrontEnd(), FrontEnd()]


def test_one_step_makes_every_series_appear(front_ends: list[FrontEnd]) -> None:
    ours = Bench(POOL, PinnedTieringManager, pins=PINS)
    server = front_ends[0]
    server.metrics.observe(ours.manager.get_stats().data)
    for name in ("pinned_chunks", "pinned_bytes", "waiting_requests", "pins_expired_total"):
        assert server.scrape(name) == 0, name
    for outcome in OUTCOMES:
        assert server.scrape("waits_total", outcome=outcome) == 0
        assert server.scrape("wait_seconds_total", outcome=outcome) == 0


def test_over_several_api_servers_counters_add_up(front_ends: list[FrontEnd]) -> None:
    # vLLM tells one of them at each step.
    ours, prompts = crowded()
    for step in range(8):
        ours.step(*(p for p in prompts if p.hits is None))
        ours.tier.run()
        front_ends[step % 2].metrics.observe(ours.manager.get_stats().data)
    assert all(prompt.hits == 40 for prompt in prompts)
    ended = [server.scrape("waits_total", outcome=IN_TIME) for server in front_ends]
    assert sum(ended) == 1
    assert [server.scrape("pinned_bytes") for server in front_ends] == [0, 0]
