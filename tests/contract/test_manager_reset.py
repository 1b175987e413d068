# SPDX-License-Identifier: Apache-2.0
"""After a reset nothing stored before is served, and what was alive stores nothing."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from tests.support.tiering import Bench, chain
from vllm_tiered_offload.manager import PinnedTieringManager, PinSettings

POOL = 32
SAYS_WHEN_FLUSHED = hasattr(TieringOffloadingManager, "on_reset_flushed")


def bench(**options: Any) -> Bench:
    pins = PinSettings(max_share=1.0, store_headroom=0.0)
    return Bench(POOL, PinnedTieringManager, pins=pins, **options)


def reset(ours: Bench, *, flushed: bool = True) -> None:
    """As vLLM's scheduler does it; 0.33 says at once that nothing was in flight."""
    ours.manager.reset_cache()
    if flushed and SAYS_WHEN_FLUSHED:
        ours.manager.on_reset_flushed()


def test_the_tiers_are_drained_and_the_pool_is_empty() -> None:
    ours = bench()
    prompt = ours.request("r", keys := chain(1, 10))
    ours.store(prompt, keys)
    reset(ours)
    assert ours.tier.drains == 1
    ours.tier.held.clear()  # what a tier with an epoch of its own does
    fresh = ours.request("new", keys)
    assert ours.run(fresh) == 0


def test_requests_alive_at_the_reset_store_nothing_even_from_chunk_0() -> None:
    ours = bench()
    prompt = ours.request("r", keys := chain(1, 10))
    ours.store(prompt, keys[:4])
    reset(ours)
    ours.tier.held.clear()
    out = ours.manager.prepare_store(keys, prompt.context)
    assert out is not None  # None would be reported and tried again every step
    assert (out.keys_to_store, out.evicted_keys, len(out.store_spec.chunk_ids)) == ([], [], 0)
    assert ours.tier.held == {}
    fresh = ours.request("new", keys)
    assert ours.store(fresh, keys) == keys
    assert set(ours.tier.held) == set(keys)
    for request in (prompt, fresh):
        ours.finish(request)
    ours.end_step()
    ours.assert_idle()


def test_the_tag_is_on_the_request_and_not_on_its_name() -> None:
    ours = bench()
    old = ours.request("same", keys := chain(1, 4))
    reset(ours)
    ours.finish(old)
    new = ours.request("same", keys)
    assert ours.store(new, keys) == keys


def test_requests_alive_at_the_reset_may_load_what_was_stored_after_it() -> None:
    ours = bench()
    old = ours.request("old", keys := chain(1, 8))
    reset(ours)
    ours.tier.held.clear()
    new = ours.request("new", keys)
    ours.store(new, keys)
    ours.end_step()
    assert ours.run(old) == 8


@pytest.mark.parametrize("moment", ["queued", "in flight", "pinned"])
def test_promotions_and_pins_end_with_the_reset(moment: str) -> None:
    ours = bench()
    ours.tier.slow = True
    prompt = ours.request("r", keys := chain(1, 2 * POOL))
    ours.stored(keys)
    if moment == "queued":
        assert not ours.try_start(prompt)
    else:
        ours.step(prompt)
    if moment == "pinned":
        ours.tier.run()
        ours.end_step()
    reset(ours)
    assert not any(v for k, v in ours.manager._book.counts().items() if k != "requests")
    ours.end_step()
    ours.tier.held.clear()
    assert ours.run(prompt) == 0
    other = ours.request("o", more := chain(2, POOL))
    assert ours.store(other, more) == more
    ours.tier.run()
    ours.end_step()
    for request in (prompt, other):
        ours.finish(request)
    ours.end_step()
    ours.assert_idle()


def test_finished_requests_are_closed_by_the_reset() -> None:
    ours = bench()
    prompt = ours.request("r", keys := chain(1, 4))
    out = ours.manager.prepare_store(keys, prompt.context)
    ours.finish(prompt)
    reset(ours)
    assert ours.tier.requests == set()
    # The scheduler drops reports of jobs from before; should one come, it is ignored.
    ours.manager.complete_store(set(out.keys_to_store), prompt.context)
    ours.assert_idle()


def test_late_copies_are_fenced_until_a_later_transfer_has_ended() -> None:
    # A copy from the GPU that was under way may still land in a row that a
    # promotion would be given.
    ours = bench()
    old = ours.request("old", keys := chain(1, 4))
    ours.manager.prepare_store(keys, old.context)
    reset(ours, flushed=False)
    ours.stored(more := chain(2, 6))
    prompt = ours.request("r", more)
    assert ours.manager.lookup(more[0], prompt.context) is LookupResult.MISS
    ours.end_step()
    assert ours.tier.loads == []
    if SAYS_WHEN_FLUSHED:
        ours.manager.on_reset_flushed()
    else:  # workers flush before they begin new copies
        ours.store(ours.request("new", chain(3, 1)), chain(3, 1))
    assert ours.run(prompt) == 6


def test_a_second_reset_does_not_lift_the_fence_of_the_first() -> None:
    ours = bench()
    old = ours.request("old", keys := chain(1, 4))
    ours.manager.prepare_store(keys, old.context)
    reset(ours, flushed=False)
    reset(ours, flushed=False)
    ours.stored(more := chain(2, 6))
    prompt = ours.request("r", more)
    assert ours.manager.lookup(more[0], prompt.context) is LookupResult.MISS


def test_without_copies_in_flight_there_is_no_fence() -> None:
    ours = bench()
    ours.request("old", chain(1, 4))
    reset(ours)
    ours.stored(more := chain(2, 6))
    assert ours.run(ours.request("r", more)) == 6


@pytest.mark.skipif(SAYS_WHEN_FLUSHED, reason="this vLLM says when")
def test_the_fence_falls_after_more_steps_than_a_pipeline_holds() -> None:
    ours = bench()
    old = ours.request("old", keys := chain(1, 4))
    ours.manager.prepare_store(keys, old.context)
    reset(ours)
    ours.stored(more := chain(2, 6))
    for _ in range(16):
        ours.end_step()
    assert ours.run(ours.request("r", more)) == 6


def test_two_resets_in_a_row() -> None:
    ours = bench()
    prompt = ours.request("r", keys := chain(1, 4))
    ours.store(prompt, keys)
    reset(ours)
    reset(ours)
    ours.finish(prompt)
    ours.end_step()
    ours.assert_idle()
