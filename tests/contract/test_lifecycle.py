# SPDX-License-Identifier: Apache-2.0
"""Every order in which vLLM's scheduler may call: no exception, nothing twice, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from tests.support.tiering import Bench, chain
from vllm_tiered_offload.manager import PinnedTieringManager, PinSettings

POOL = 32


@pytest.fixture
def ours() -> Bench:
    pins = PinSettings(max_share=1.0, store_headroom=0.0)
    return Bench(POOL, PinnedTieringManager, pins=pins, events=True)


@pytest.mark.parametrize("moment", ["queued", "in flight", "landed", "pinned"])
def test_abort_while_a_promotion_is_under_way(ours: Bench, moment: str) -> None:
    ours.tier.slow = True
    prompt = ours.request("r", keys := chain(1, 2 * POOL))
    ours.stored(keys)
    if moment == "queued":
        assert not ours.try_start(prompt)
    else:
        ours.step(prompt)
    if moment in ("landed", "pinned"):
        ours.tier.run()
    if moment == "pinned":
        ours.end_step()
    ours.finish(prompt)
    ours.end_step()
    ours.tier.run()
    ours.end_step()
    assert len(ours.tier.loads) == (0 if moment == "queued" else POOL)
    other = ours.request("o", more := chain(2, POOL))
    assert len(ours.store(other, more)) == POOL
    ours.finish(other)
    ours.assert_idle()


def test_preemption_begins_a_new_admission(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, 8))
    ours.stored(keys)
    assert ours.run(prompt) == 8
    ours.end_step(preempted=["r"])
    filler = ours.request("f", more := chain(2, POOL))
    ours.store(filler, more)  # evicts what was loaded
    ours.finish(filler)
    ours.end_step()
    prompt.hits = None
    prompt.loaded.clear()
    assert ours.run(prompt) == 8  # read once more: it has been used in between
    assert len(ours.tier.loads) == 16
    ours.finish(prompt)
    ours.assert_idle()


def test_a_request_that_starts_without_a_load_gives_up_its_pins(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, POOL))
    ours.stored(keys)
    ours.step(prompt)
    ours.end_step()
    assert ours.manager._book.counts()["pinned"] == POOL
    ours.end_step(prompt)  # scheduled as new, nothing loaded
    assert ours.manager._book.counts()["pinned"] == 0


def test_a_resumed_request_gives_up_its_pins_when_it_stores(ours: Bench) -> None:
    # vLLM names new requests at the step's end, resumed ones it does not.
    prompt = ours.request("r", keys := chain(1, 8))
    ours.stored(keys)
    ours.step(prompt)
    ours.end_step()
    ours.manager.prepare_store(chain(2, 1), prompt.context)
    assert ours.manager._book.counts()["pinned"] == 0


def test_a_promotion_that_lands_after_the_start_is_not_pinned(ours: Bench) -> None:
    ours.tier.slow = True
    prompt = ours.request("r", keys := chain(1, POOL))
    ours.stored(keys)
    ours.step(prompt)
    ours.end_step(prompt)
    ours.tier.run()
    ours.end_step()
    assert ours.manager._book.counts()["pinned"] == 0
    ours.finish(prompt)
    ours.assert_idle()


def test_load_reported_twice_does_not_unpin_anothers_chunk(ours: Bench) -> None:
    keys = chain(1, 4)
    a, b = ours.request("a", keys), ours.request("b", keys)
    ours.store(a, keys)
    ours.end_step()
    for request in (a, b):
        ours.manager.prepare_load(keys, request.context)
    for _ in range(3):
        ours.manager.complete_load(set(keys), a.context)
    filler = ours.request("f", more := chain(2, POOL))
    assert ours.store(filler, more) == []  # b's load still holds four rows
    ours.manager.complete_load(set(keys), b.context)
    assert ours.store(filler, more) == more
    for request in (a, b, filler):
        ours.finish(request)
    ours.assert_idle()


def test_unknown_and_late_callbacks_are_ignored(ours: Bench) -> None:
    stranger, keys = ReqContext(req_id="stranger"), chain(1, 4)
    ours.manager.complete_load(set(keys), stranger)
    ours.manager.complete_store(set(keys), stranger)
    ours.manager.complete_store(set(keys), stranger, False)
    ours.manager.on_request_finished(stranger)
    assert ours.manager.prepare_store(keys, stranger).keys_to_store == []
    assert ours.manager.lookup(keys[0], stranger) is LookupResult.MISS
    ours.manager.touch(keys, stranger)
    ours.manager.on_schedule_end(ScheduleEndContext(["nobody"], ["nobody"]))
    prompt = ours.request("r", keys)
    ours.store(prompt, keys)
    ours.finish(prompt)
    ours.finish(prompt)
    assert ours.manager.prepare_store(keys, prompt.context).keys_to_store == []
    ours.manager.complete_store(set(keys), prompt.context)
    ours.assert_idle()


def test_a_late_store_report_does_not_publish_a_row_that_a_promotion_fills(
    ours: Bench,
) -> None:
    ours.tier.slow = True
    prompt = ours.request("r", keys := chain(1, 4))
    ours.stored(keys)
    ours.step(prompt)  # the disk is filling four rows
    ours.manager.complete_store(set(keys), prompt.context)
    assert ours.manager.lookup(keys[0], prompt.context) is LookupResult.HIT_PENDING
    ours.tier.run()
    ours.end_step()
    assert ours.run(prompt) == 4


def test_a_store_that_failed_gives_its_rows_back(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, POOL))
    ours.manager.prepare_store(keys, prompt.context)
    ours.manager.complete_store(set(keys), prompt.context, False)
    assert ours.tier.held == {}
    assert len(ours.store(prompt, chain(2, POOL))) == POOL
    ours.finish(prompt)
    ours.assert_idle()


def test_stores_that_end_after_the_request_are_cascaded(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, 6))
    ours.manager.prepare_store(keys[:3], prompt.context)
    ours.manager.prepare_store(keys[3:], prompt.context)
    ours.finish(prompt)
    assert ours.tier.requests == {"r"}
    for part in (keys[:3], keys[3:]):
        ours.manager.complete_store(set(part), prompt.context)
    assert set(ours.tier.held) == set(keys)
    ours.assert_idle()


@pytest.mark.parametrize("order", ["old first", "new first"])
def test_a_request_id_that_comes_again_before_its_last_store_ended(
    ours: Bench, order: str
) -> None:
    old = ours.request("same", keys := chain(1, 4))
    ours.manager.prepare_store(keys, old.context)
    ours.finish(old)
    new = ours.request("same", more := chain(2, 4))
    ours.manager.prepare_store(more, new.context)
    reports = [(keys, old), (more, new)]
    for part, request in reports if order == "old first" else reversed(reports):
        ours.manager.complete_store(set(part), request.context)
    assert set(ours.tier.held) == set(more)
    ours.finish(old)
    ours.finish(new)
    ours.assert_idle()


def test_the_old_stores_are_reported_under_the_new_request(ours: Bench) -> None:
    # vLLM finds a job's request by its id.
    old = ours.request("same", keys := chain(1, 4))
    ours.manager.prepare_store(keys, old.context)
    ours.finish(old)
    new = ours.request("same", chain(2, 4))
    ours.manager.complete_store(set(keys), new.context)
    ours.finish(new)
    ours.assert_idle()


def test_a_request_announced_twice(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, 4))
    ours.stored(keys)
    ours.step(prompt)
    ours.manager.on_new_request(prompt.context)
    assert ours.run(prompt) == 4
    ours.finish(prompt)
    ours.assert_idle()


def test_a_chunk_being_loaded_is_neither_evicted_nor_stored_again(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, 4))
    ours.store(prompt, keys)
    ours.end_step()
    ours.manager.prepare_load(keys, prompt.context)
    other = ours.request("o", [*keys, *chain(2, POOL)])
    assert ours.store(other, keys) == []
    assert len(ours.store(other, chain(2, POOL - 4))) == POOL - 4
    ours.manager.complete_load(set(keys), prompt.context)
    for request in (prompt, other):
        ours.finish(request)
    ours.assert_idle()


def test_a_chunk_being_promoted_is_not_stored(ours: Bench) -> None:
    ours.tier.slow = True
    prompt = ours.request("r", keys := chain(1, 4))
    ours.stored(keys)
    ours.step(prompt)
    other = ours.request("o", keys)
    assert ours.store(other, keys) == []
    ours.tier.run()
    ours.end_step()
    assert ours.run(prompt) == 4


def test_shutdown_twice_and_calls_after_it(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, POOL))
    ours.stored(keys)
    ours.step(prompt)
    ours.end_step()
    manager: Any = ours.manager
    manager.shutdown()
    manager.shutdown()
    assert (ours.tier.shutdowns, ours.region.cleanups) == (1, 1)
    assert list(manager.take_events()) == []
    assert manager.get_stats() is None
    assert manager.has_pending_work() is False
    assert manager.lookup(keys[0], prompt.context) is LookupResult.MISS
    assert manager.prepare_store(keys, prompt.context).keys_to_store == []
    manager.complete_store(set(keys), prompt.context)
    manager.complete_load(set(keys), prompt.context)
    manager.on_schedule_end(ScheduleEndContext((), ()))
    manager.reset_cache()
    manager.on_reset_flushed()
    late = ReqContext(req_id="late")
    manager.on_new_request(late)
    manager.on_request_finished(late)
    manager.on_request_finished(prompt.context)


def test_shutdown_before_use(ours: Bench) -> None:
    ours.manager.shutdown()
    ours.manager.shutdown()
    assert ours.region.cleanups == 1


def test_a_tier_that_cannot_stop_keeps_the_memory(ours: Bench) -> None:
    def fail() -> None:
        raise RuntimeError("busy")

    ours.tier.shutdown = fail
    with pytest.raises(RuntimeError, match="busy"):
        ours.manager.shutdown()
    ours.manager.shutdown()
    assert ours.region.cleanups == 0  # the tier may still write to it


def test_events_of_the_pool_come_once(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, 4))
    ours.store(prompt, keys)
    events = list(ours.manager.take_events())
    assert [set(event.keys) for event in events] == [set(keys)]
    assert list(ours.manager.take_events()) == []


# --- loads that fail ---


def test_a_chunk_whose_load_failed_is_a_miss_and_not_tried_again(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, 10))
    ours.stored(keys)
    ours.tier.bad = {keys[6]}
    assert ours.run(prompt) == 6
    assert ours.tier.loads == keys
    assert prompt.steps == 2
    ours.finish(prompt)
    ours.assert_idle()


@pytest.mark.parametrize("bad", [0, 3, 9])
def test_every_waiting_request_makes_at_most_one_attempt(ours: Bench, bad: int) -> None:
    keys = chain(1, 10)
    prompts = [ours.request(str(i), keys) for i in range(3)]
    ours.stored(keys)
    ours.tier.bad = {keys[bad]}
    for _ in range(10):
        ours.step(*(p for p in prompts if p.hits is None))
    assert [p.hits for p in prompts] == [bad] * 3
    assert ours.tier.loads.count(keys[bad]) <= 3
    for prompt in prompts:
        ours.finish(prompt)
    ours.assert_idle()


def test_all_loads_fail(ours: Bench) -> None:
    prompt = ours.request("r", keys := chain(1, 2 * POOL))
    ours.stored(keys)
    ours.tier.bad = set(keys)
    assert ours.run(prompt) == 0
    assert prompt.steps == 2
    ours.finish(prompt)
    ours.assert_idle()


def test_a_window_with_a_bad_chunk_does_not_hang(ours: Bench) -> None:
    full, window = chain(1, 12), chain(1, 12, group=1)
    prompt = ours.request("r", full, window, windows=[None, 4])
    ours.stored([*full, *window])
    ours.tier.bad = {window[9]}
    hits = ours.run(prompt)
    assert hits is not None
    assert hits <= 9
    assert all(ours.tier.loads.count(key) <= 1 for key in ours.tier.loads)
