# SPDX-License-Identifier: Apache-2.0
"""Waiting for room: through vLLM's own search, with one and several KV groups."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.support.tiering import POSITIONS, Bench, Prompt, chain
from vllm_tiered_offload.manager import PinnedTieringManager, PinSettings

POOL = 64
WINDOW = 4


def bench(
    patience: float = 10.0, deadline: float = 30.0, chunks: int = POOL, **options: Any
) -> Bench:
    pins = PinSettings(max_share=1.0, store_headroom=0.0, patience=patience, deadline=deadline)
    return Bench(chunks, PinnedTieringManager, pins=pins, **options)


def long_prompts(ours: Bench, count: int, length: int) -> list[Prompt]:
    prompts = [ours.request(str(i), chain(i, length)) for i in range(count)]
    for prompt in prompts:
        ours.stored(prompt.groups[0])
    return prompts


def run_all(ours: Bench, prompts: list[Prompt], steps: int = 100) -> None:
    """All wait in one queue; the disk needs one step for one job."""
    for _ in range(steps):
        ours.step(*(p for p in prompts if p.hits is None))
        ours.tier.run(1)
        ours.clock.now += 0.01
        if all(p.hits is not None for p in prompts):
            return
    raise AssertionError(
        f"not started: {[p.context.req_id for p in prompts if p.hits is None]}"
    )


def test_with_patience_every_prompt_is_loaded_whole() -> None:
    ours = bench()
    ours.tier.slow = True
    prompts = long_prompts(ours, 6, 40)
    run_all(ours, prompts)
    assert [p.hits for p in prompts] == [40] * 6
    assert len(ours.tier.loads) == 6 * 40
    for prompt in prompts:
        ours.finish(prompt)
    ours.end_step()
    ours.assert_idle()


def test_without_patience_the_others_recompute() -> None:
    ours = bench(patience=0)
    ours.tier.slow = True
    prompts = long_prompts(ours, 6, 40)
    run_all(ours, prompts)
    assert [p.hits for p in prompts] == [40, 24, 0, 0, 0, 0]


def test_patience_ends_by_the_wall_clock_and_takes_what_is_there() -> None:
    ours = bench(patience=1.0)
    ours.tier.slow = True  # and it never ends a job: nothing is given back
    first, second, third = long_prompts(ours, 3, 40)
    ours.step(first)
    assert not ours.step(second, third)
    assert len(ours.tier.loads) == 40  # nothing was taken while waiting
    ours.clock.now += 0.99
    assert not ours.step(second, third)
    assert len(ours.tier.loads) == 40
    ours.clock.now += 0.02
    ours.step(second, third)
    assert second.hits is None  # it took the 24 that were left
    assert third.hits == 0
    assert len(ours.tier.loads) == POOL


def test_a_request_waits_only_while_others_hold_what_it_could_get() -> None:
    # Three quarters of all it could ever get is enough.
    ours = bench()
    ours.tier.slow = True
    small = ours.request("small", chain(1, 10))
    large = ours.request("large", chain(2, 3 * POOL))
    ours.stored(small.groups[0] + large.groups[0])
    ours.step(small, large)
    assert len(ours.tier.loads) == POOL
    ours.tier.run()
    ours.step(small, large)
    assert (small.hits, large.hits) == (10, 54)


def test_the_same_blocked_key_is_answered_retry_and_later_ones_miss() -> None:
    ours = bench()
    ours.tier.slow = True
    first, second = long_prompts(ours, 2, POOL)
    ours.step(first)
    keys = second.groups[0]
    for _ in range(3):  # steps
        for _ in range(2):  # repeated searches within one
            answers = [ours.manager.lookup(key, second.context) for key in keys[:3]]
            assert answers == [LookupResult.RETRY, LookupResult.MISS, LookupResult.MISS]
        ours.end_step()


def test_the_step_in_which_waiting_begins_answers_consistently() -> None:
    ours = bench()
    ours.tier.slow = True
    first = ours.request("first", chain(1, 50))
    second = ours.request("second", keys := chain(2, 40))
    ours.stored(first.groups[0] + keys)
    ours.step(first)
    # 14 are queued, the 15th finds no room: the queue is given back, and a
    # second search in the same step must not read a definite zero.
    assert ours.look_up(second) is None
    assert ours.manager._book.counts()["queued"] == 0
    assert ours.look_up(second) is None
    ours.end_step()
    assert len(ours.tier.loads) == 50


def test_a_request_behind_gets_the_room_that_the_waiting_one_gave_back() -> None:
    ours = bench()
    ours.tier.slow = True
    first = ours.request("first", chain(1, 50))
    waiting = ours.request("waiting", chain(2, 40))
    small = ours.request("small", chain(3, 10))
    ours.stored(first.groups[0] + waiting.groups[0] + small.groups[0])
    ours.step(first, waiting, small)
    ours.tier.run()
    ours.step(small)
    assert small.hits == 10


def test_a_waiting_request_keeps_its_resident_head_out_of_the_reckoning() -> None:
    ours = bench()
    keys = chain(1, 100)
    head = ours.request("head", keys)
    ours.store(head, keys[:60])
    ours.finish(head)
    ours.end_step()
    ours.stored(keys)
    ours.tier.slow = True
    other = ours.request("other", chain(2, 4))
    ours.stored(other.groups[0])
    ours.step(other)  # the last four rows
    prompt = ours.request("r", keys)
    assert ours.run(prompt) == 60  # four rows are not worth a wait
    assert prompt.steps == 1


def test_other_tiers_requests_never_wait() -> None:
    # A peer asks through its tier (exclude_tier_idx) and must get an answer.
    ours = bench(tiers=2)
    ours.tiers[1].slow = True
    first = ours.request("first", chain(1, POOL))
    ours.stored(first.groups[0], tier=1)
    ours.step(first)
    peer = type(first.context)(req_id="peer")
    ours.manager.on_new_request(peer, exclude_tier_idx=0)
    ours.stored(keys := chain(2, 5), tier=1)
    for key in keys:
        assert ours.manager.lookup(key, peer, exclude_tier_idx=0) is LookupResult.MISS
    ours.manager.on_request_finished(peer, exclude_tier_idx=0)


# --- several KV groups ---


def hybrid(ours: Bench, name: str, number: int, length: int, windows: int = 1) -> Prompt:
    groups = [chain(number, length, group) for group in range(1 + windows)]
    prompt = ours.request(name, *groups, windows=[None] + [WINDOW] * windows)
    for keys in groups:
        ours.stored(keys)
    return prompt


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("length", [10, 30])
def test_a_hybrid_prefix_that_fits_is_loaded_whole(length: int, windows: int) -> None:
    ours = bench(groups=1 + windows)
    prompt = hybrid(ours, "r", 1, length, windows)
    assert ours.run(prompt) == length
    assert len(ours.tier.loads) == length + windows * WINDOW  # and not one more


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("length", [POOL, 3 * POOL])
def test_a_hybrid_prefix_larger_than_the_pool_is_served_in_part(
    length: int, windows: int
) -> None:
    ours = bench(groups=1 + windows)
    prompt = hybrid(ours, "r", 1, length, windows)
    hits = ours.run(prompt)
    assert hits is not None
    assert hits >= POOL // 2
    assert len(ours.tier.loads) == hits + windows * WINDOW  # no window in vain
    assert prompt.steps == (2 if POSITIONS else 3)


def ends_of_prompts(ours: Bench, name: str, length: int, *ends: int) -> Prompt:
    """A hybrid as vLLM stores it: windows only where a prompt has ended."""
    full, window = chain(7, length), chain(7, length, group=1)
    ours.stored(full)
    for end in ends:
        ours.stored(window[end - WINDOW : end])
    return ours.request(name, full, window, windows=[None, WINDOW])


@pytest.mark.parametrize("length", [POOL - WINDOW, 30])
def test_a_prefix_and_its_window_that_just_fit_are_served_whole(length: int) -> None:
    ours = bench(groups=2)
    prompt = ends_of_prompts(ours, "r", length, 10, length)
    assert ours.run(prompt) == length
    assert len(ours.tier.loads) == length + WINDOW


def test_a_prefix_that_must_be_cut_is_served_up_to_an_earlier_prompts_end() -> None:
    ours = bench(groups=2)
    prompt = ends_of_prompts(ours, "r", 3 * POOL, 40, 3 * POOL)
    assert ours.run(prompt) == 40
    assert len(ours.tier.loads) <= POOL


@pytest.mark.skipif(not POSITIONS, reason="this vLLM does not tell positions")
def test_nothing_is_read_if_no_window_ends_before_the_cut() -> None:
    ours = bench(groups=2)
    prompt = ends_of_prompts(ours, "r", 3 * POOL, 3 * POOL)
    assert ours.run(prompt) == 0
    assert prompt.steps == 1
    assert ours.tier.loads == []


def test_hybrids_wait_in_every_group() -> None:
    ours = bench(groups=2)
    ours.tier.slow = True
    first = hybrid(ours, "first", 1, 50)
    second = hybrid(ours, "second", 2, 30)
    for _ in range(5):
        assert not ours.step(first, second)
        ours.clock.now += 0.1
    run_all(ours, [first, second])
    assert (first.hits, second.hits) == (50, 30)


def test_hybrids_start_in_the_end_although_the_disk_never_answers() -> None:
    ours = bench(patience=0.5, deadline=0.4, groups=2)
    ours.tier.slow = True
    first = hybrid(ours, "first", 1, 48)
    second = hybrid(ours, "second", 2, 48)
    ours.step(first)
    assert ours.run(second, steps=100) == 0
    assert second.steps > 50  # its patience


@pytest.mark.parametrize("length", [3, WINDOW, POOL, 3 * POOL])
def test_windows_alone(length: int) -> None:
    ours = bench()
    prompt = ours.request("r", keys := chain(1, length), windows=[WINDOW])
    ours.stored(keys)
    assert ours.run(prompt) == length
    assert len(ours.tier.loads) == min(length, WINDOW)


def test_windows_wait_too() -> None:
    ours = bench(chunks=6)
    ours.tier.slow = True
    prompts = []
    for number in range(4):
        keys = chain(number, 20)
        prompts.append(ours.request(str(number), keys, windows=[WINDOW]))
        ours.stored(keys)
    run_all(ours, prompts)
    assert [p.hits for p in prompts] == [20] * 4
    assert len(ours.tier.loads) == 4 * WINDOW


@pytest.mark.parametrize("pool", range(1, 12))
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_small_pools_end_too(pool: int, policy: str) -> None:
    pins = PinSettings(patience=0.2)
    ours = Bench(pool, PinnedTieringManager, pins=pins, groups=2, policy=policy)
    prompts = [hybrid(ours, str(i), i, 8) for i in range(3)]
    for prompt in prompts:
        assert ours.run(prompt) is not None
    distinct = 8 + WINDOW + WINDOW  # a window in vain, at most
    assert len(ours.tier.loads) <= 3 * distinct
