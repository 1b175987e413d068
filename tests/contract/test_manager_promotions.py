# SPDX-License-Identifier: Apache-2.0
"""Prefixes larger than the pool: vLLM's manager reads them for ever, ours ends."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from tests.support.tiering import Bench, chain
from vllm_tiered_offload.manager import PinnedTieringManager, PinSettings

POOL = 64
ALL = PinSettings(max_share=1.0, store_headroom=0.0)


def bench(pins: PinSettings | None = None, chunks: int = POOL, **options: Any) -> Bench:
    return Bench(chunks, PinnedTieringManager, pins=pins, **options)


def test_vllm_alone_never_answers_for_a_prefix_one_chunk_larger_than_the_pool() -> None:
    # The reason for all of this. Should it fail one day, vLLM has mended it.
    vllm = Bench(POOL, TieringOffloadingManager)
    prompt = vllm.request("r", keys := chain(1, POOL + 1))
    vllm.stored(keys)
    assert vllm.run(prompt, steps=200) is None
    assert len(vllm.tier.loads) > 5 * len(keys)


@pytest.mark.parametrize("length", [1, POOL - 1, POOL, POOL + 1, 80, 3 * POOL, 10 * POOL])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_prefix_is_served_as_far_as_it_fits(length: int, policy: str) -> None:
    ours = bench(ALL, policy=policy)
    prompt = ours.request("r", keys := chain(1, length))
    ours.stored(keys)
    assert ours.run(prompt) == min(length, POOL)
    assert prompt.steps == 2
    assert ours.tier.loads == keys[:POOL]  # each once, in prefix order
    assert len(ours.tier.load_jobs) == 1
    ours.finish(prompt)
    ours.assert_idle()


@pytest.mark.parametrize("length", [POOL + 1, 3 * POOL])
def test_a_slow_disk_changes_the_steps_and_not_the_bytes(length: int) -> None:
    ours = bench(ALL)
    ours.tier.slow = True
    prompt = ours.request("r", keys := chain(1, length))
    ours.stored(keys)
    for _ in range(20):
        assert not ours.step(prompt)
    ours.tier.run()
    assert ours.run(prompt, steps=2) == POOL
    assert len(ours.tier.loads) == POOL


def test_the_cap_is_a_share_of_the_pool() -> None:
    ours = bench(PinSettings(max_share=0.25, store_headroom=0.0))
    prompt = ours.request("r", keys := chain(1, 3 * POOL))
    ours.stored(keys)
    assert ours.run(prompt) == POOL // 4


def test_the_cap_counts_all_requests_together() -> None:
    ours = bench(PinSettings(max_share=0.5, store_headroom=0.0, patience=0))
    ours.tier.slow = True
    prompts = [ours.request(str(i), chain(i, 20)) for i in range(4)]
    for prompt in prompts:
        ours.stored(prompt.groups[0])
    ours.step(*prompts)
    assert len(ours.tier.loads) == POOL // 2
    ours.tier.run()
    held = 0
    for _ in range(5):
        held = max(held, ours.manager._book.counts()["pinned"])
        ours.step(*(p for p in prompts if p.hits is None))
    assert held <= POOL // 2
    assert [p.hits for p in prompts] == [20, 12, 0, 0]


def test_promotions_leave_head_room_for_stores() -> None:
    ours = bench(PinSettings(max_share=1.0, store_headroom=0.25))
    ours.tier.slow = True
    prompt = ours.request("r", keys := chain(1, 3 * POOL))
    ours.stored(keys)
    ours.step(prompt)
    other = ours.request("o", more := chain(2, POOL))
    assert len(ours.store(other, more[: POOL // 4])) == POOL // 4
    assert ours.store(other, more[POOL // 4 : POOL // 4 + 1]) == []
    ours.tier.run()
    assert ours.run(prompt) == POOL * 3 // 4


def test_pins_hold_against_stores_until_the_load_and_not_longer() -> None:
    ours = bench(ALL)
    prompt = ours.request("r", keys := chain(1, POOL))
    ours.stored(keys)
    ours.step(prompt)
    ours.end_step()  # the promotion has ended: everything is pinned
    other = ours.request("o", more := chain(2, 8))
    assert ours.store(other, more) == []
    assert ours.try_start(prompt)
    # An asynchronous load is "scheduled" many steps later: the pins must not wait for it.
    assert ours.manager._book.counts()["pinned"] == 0
    assert ours.store(other, more) == more


def test_pins_end_at_the_deadline() -> None:
    ours = bench(PinSettings(max_share=1.0, store_headroom=0.0, deadline=5.0))
    prompt = ours.request("r", keys := chain(1, POOL + 1))
    ours.stored(keys)
    ours.step(prompt)
    ours.end_step()
    other = ours.request("o", more := chain(2, 8))
    ours.clock.now += 4.9
    ours.end_step()
    assert ours.store(other, more) == []
    ours.clock.now += 0.2
    ours.end_step()
    assert ours.store(other, more) == more
    # What is left is used, what was lost is not read again.
    assert ours.run(prompt, steps=1) is not None
    assert len(ours.tier.loads) == POOL


def test_the_resident_head_of_a_prefix_is_not_evicted_by_its_own_tail() -> None:
    ours = bench(ALL)
    keys = chain(1, 100)
    first = ours.request("first", keys)
    assert ours.store(first, keys[:40]) == keys[:40]
    ours.finish(first)
    ours.stored(keys)
    prompt = ours.request("r", keys)
    assert ours.run(prompt) == POOL
    assert ours.tier.loads == keys[40:POOL]


def test_the_resident_head_is_held_with_the_promoted_tail() -> None:
    ours = bench(ALL)
    keys = chain(1, 30)
    first = ours.request("first", keys)
    ours.store(first, keys[:10])
    ours.finish(first)
    ours.end_step()
    ours.stored(keys)
    prompt = ours.request("r", keys)
    ours.step(prompt)
    other = ours.request("o", more := chain(2, POOL))
    assert ours.store(other, more[: POOL - 29]) == []
    assert len(ours.store(other, more[: POOL - 30])) == POOL - 30
    assert ours.run(prompt) == 30
    assert ours.tier.loads == keys[10:]


def test_hits_that_a_store_of_the_same_step_evicts_are_not_pinned() -> None:
    ours = bench(ALL, chunks=16)
    keys = chain(1, 12)
    first = ours.request("first", keys)
    ours.store(first, keys[:6])
    ours.finish(first)
    ours.end_step()
    ours.stored(keys)
    prompt = ours.request("r", keys)
    assert not ours.try_start(prompt)
    other = ours.request("o", more := chain(2, 16))
    assert ours.store(other, more[:14]) == more[:14]  # four of the six are gone
    ours.end_step()
    assert ours.run(prompt) is not None
    for request in (prompt, other):
        ours.finish(request)
    ours.assert_idle()


def test_a_prefix_that_fills_the_pool_starts_at_once() -> None:
    ours = bench(ALL)
    keys = chain(1, POOL + 30)
    first = ours.request("first", keys)
    ours.store(first, keys[:POOL])
    ours.finish(first)
    ours.stored(keys)
    prompt = ours.request("r", keys)
    assert ours.run(prompt) == POOL
    assert prompt.steps == 1
    assert ours.tier.loads == []


def test_an_asynchronous_tier_is_asked_until_it_knows() -> None:
    ours = bench(ALL)
    ours.tier.shy = True
    prompt = ours.request("r", keys := chain(1, 30))
    ours.stored(keys)
    assert ours.run(prompt) == 30
    assert prompt.steps == 3


def test_two_requests_share_one_promotion() -> None:
    ours = bench(ALL)
    a, b = (ours.request(name, chain(1, 20)) for name in "ab")
    ours.stored(a.groups[0])
    ours.step(a, b)
    ours.step(a, b)
    assert (a.hits, b.hits) == (20, 20)
    assert len(ours.tier.loads) == 20


def test_an_abort_leaves_the_shared_chunks_to_the_other() -> None:
    ours = bench(ALL)
    ours.tier.slow = True
    a = ours.request("a", chain(1, 20))
    b = ours.request("b", [*chain(1, 20), *chain(2, 10)])
    ours.stored(b.groups[0])
    ours.step(a, b)
    ours.finish(a)
    ours.tier.run()
    ours.step(b)
    assert b.hits == 30
    assert len(ours.tier.loads) == 30


def test_one_prepare_write_a_request_and_step() -> None:
    ours = bench(ALL)
    calls = []
    real = ours.pool.prepare_write

    def counting(keys: Any, context: Any) -> Any:
        calls.append(list(keys))
        return real(keys, context)

    ours.pool.prepare_write = counting
    prompts = [ours.request(str(i), chain(i, 10)) for i in range(3)]
    for prompt in prompts:
        ours.stored(prompt.groups[0])
    ours.step(*prompts)
    assert calls == [prompt.groups[0] for prompt in prompts]


def test_a_store_of_the_same_step_takes_precedence_over_queued_promotions() -> None:
    # vLLM 0.33 asks for stores before the step's end, when the rows are taken.
    ours = bench(ALL, chunks=8)
    prompt = ours.request("r", keys := chain(1, 8))
    ours.stored(keys)
    assert not ours.try_start(prompt)
    other = ours.request("o", more := chain(2, 5))
    assert ours.store(other, more) == more
    ours.end_step()
    # The stored rows are evictable again (the tier was quick): all eight fit.
    assert ours.run(prompt) == 8


def test_a_store_under_way_leaves_less_to_the_queue() -> None:
    ours = bench(ALL, chunks=8)
    prompt = ours.request("r", keys := chain(1, 8))
    ours.stored(keys)
    assert not ours.try_start(prompt)
    other = ours.request("o", more := chain(2, 5))
    out = ours.manager.prepare_store(more, other.context)
    ours.end_step()
    assert ours.run(prompt) == 3
    ours.manager.complete_store(set(out.keys_to_store), other.context)


def test_a_key_that_is_stored_while_its_promotion_is_queued_is_not_read() -> None:
    ours = bench(ALL)
    prompt = ours.request("r", keys := chain(1, 10))
    ours.stored(keys)
    assert not ours.try_start(prompt)
    other = ours.request("o", keys)
    assert ours.store(other, keys[:4]) == keys[:4]
    ours.end_step()
    assert ours.run(prompt) == 10
    assert ours.tier.loads == keys[4:]


def test_the_second_tier_serves_what_the_first_does_not_have() -> None:
    ours = bench(ALL, tiers=2)
    prompt = ours.request("r", keys := chain(1, 12))
    ours.stored(keys[:5], tier=0)
    ours.stored(keys[5:], tier=1)
    assert ours.run(prompt) == 12
    assert (ours.tiers[0].loads, ours.tiers[1].loads) == (keys[:5], keys[5:])


def test_nobody_waits_for_a_disk_that_does_not_answer() -> None:
    ours = bench(PinSettings(max_share=1.0, store_headroom=0.0, deadline=5.0))
    ours.tier.slow = True
    a, b = (ours.request(name, chain(1, 20)) for name in "ab")
    ours.stored(a.groups[0])
    for _ in range(5):
        assert not ours.step(a, b)
        ours.clock.now += 1.0
    ours.clock.now += 1.0
    ours.end_step()
    assert ours.step(a, b) == [a, b]
    assert (a.hits, b.hits) == (0, 0)
    # The rows stay reserved as long as the disk may write to them.
    other = ours.request("o", more := chain(2, POOL))
    assert len(ours.store(other, more[: POOL - 20])) == POOL - 20
    assert ours.store(other, more[POOL - 20 :]) == []
    ours.tier.run()
    ours.end_step()
    for prompt in (a, b, other):
        ours.finish(prompt)
    ours.end_step()
    ours.assert_idle()


def test_a_pool_that_refuses_many_keys_is_asked_for_fewer() -> None:
    ours = bench(ALL)
    real = ours.pool.prepare_write
    ours.pool.prepare_write = lambda keys, context: (
        None if len(keys) > 7 else real(keys, context)
    )
    prompt = ours.request("r", keys := chain(1, 20))
    ours.stored(keys)
    assert ours.run(prompt) == 20
    assert ours.tier.loads == keys
    assert [len(job.keys) for job in ours.tier.load_jobs] == [5, 7, 4, 4]
