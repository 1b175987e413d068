# SPDX-License-Identifier: Apache-2.0
"""The eviction policy: which chunks it saves, what it forgets, and how close it is to LRU."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_offload.store.eviction import SecondChance

CAPACITY = 800
PERIOD = CAPACITY // 8  # chunks written per period of the policy


def key_of(number: int) -> bytes:
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little")) * 2 + bytes(4)


def make_policy(capacity: int = CAPACITY, copies_per_store: float = 1.0) -> SecondChance:
    return SecondChance(capacity, copies_per_store, digest=xxhash.xxh3_64_intdigest)


def survivors(policy: SecondChance, keys: Sequence[bytes]) -> list[bytes]:
    return policy.choose_copies(keys)


A, B, C, D = (key_of(number) for number in range(4))


def test_a_chunk_never_hit_is_not_copied() -> None:
    policy = make_policy()
    policy.on_stored(1)
    assert survivors(policy, [A]) == []


def test_a_chunk_hit_late_in_its_residency_is_copied() -> None:
    policy = make_policy()
    policy.on_stored(1)
    policy.on_stored(5 * PERIOD)
    policy.on_hit(A)
    policy.on_stored(3 * PERIOD)
    assert survivors(policy, [A]) == [A]


def test_a_chunk_hit_once_and_long_ago_is_not_copied() -> None:
    policy = make_policy()
    policy.on_stored(1)
    policy.on_hit(A)
    policy.on_stored(7 * PERIOD)
    assert survivors(policy, [A]) == []


def test_a_chunk_hit_in_two_periods_is_copied_however_long_ago() -> None:
    policy = make_policy()
    policy.on_stored(1)
    policy.on_hit(A)
    policy.on_stored(PERIOD)
    policy.on_hit(A)
    policy.on_stored(6 * PERIOD)
    assert survivors(policy, [A]) == [A]


def test_look_ups_that_repeat_within_a_period_are_one_hit() -> None:
    policy = make_policy()
    policy.on_stored(1)
    for _ in range(100):
        policy.on_hit(A)
    policy.on_stored(7 * PERIOD)
    assert survivors(policy, [A]) == []


def test_a_copy_uses_up_a_single_hit() -> None:
    policy = make_policy()
    policy.on_stored(1)
    policy.on_hit(A)
    policy.on_moved([A])
    assert survivors(policy, [A]) == []


def test_copies_halve_the_count() -> None:
    policy = make_policy()
    policy.on_stored(1)
    for _ in range(4):
        policy.on_hit(A)
        policy.on_stored(PERIOD)
    rounds = 0
    while survivors(policy, [A]) and rounds < 10:
        policy.on_moved([A])
        policy.on_stored(8 * PERIOD)
        rounds += 1
    assert rounds == 2  # 4 hits, then 2, then 1, which is old by then


def test_an_evicted_chunk_leaves_no_mark() -> None:
    policy = make_policy()
    policy.on_stored(1)
    policy.on_hit(A)
    policy.on_evicted([A])
    assert survivors(policy, [A]) == []


@pytest.mark.parametrize(("copies_per_store", "most"), [(1.0, 40), (0.5, 20), (0.0, 0)])
def test_copies_are_bounded_by_stores_and_keep_their_order(
    copies_per_store: float, most: int
) -> None:
    policy = make_policy(copies_per_store=copies_per_store)
    keys = [key_of(number) for number in range(40)]
    policy.on_stored(len(keys))
    for key in keys:
        policy.on_hit(key)
    assert policy.choose_copies(keys) == keys[:most]
    assert policy.worth_copying(keys) == keys


def test_copies_spend_what_stores_have_saved_up() -> None:
    policy = make_policy()
    keys = [key_of(number) for number in range(400)]
    policy.on_stored(CAPACITY)
    for key in keys:
        policy.on_hit(key)
    first = policy.choose_copies(keys)
    assert first == keys[: CAPACITY // 4]
    policy.on_moved(first)
    assert survivors(policy, keys) == []
    policy.on_stored(30)
    assert survivors(policy, keys) == keys[CAPACITY // 4 :][:30]


@given(
    st.lists(st.tuples(st.sampled_from("hmes"), st.integers(0, 30)), max_size=200),
    st.integers(1, 40),
    st.floats(0, 2),
)
@settings(max_examples=200, deadline=None)
def test_any_sequence_of_calls_gives_an_ordered_bounded_choice(
    calls: list[tuple[str, int]], capacity: int, copies: float
) -> None:
    policy = make_policy(capacity, copies)
    for name, number in calls:
        key = key_of(number)
        if name == "s":
            policy.on_stored(number)
        else:
            {
                "h": policy.on_hit,
                "m": lambda key: policy.on_moved([key]),
                "e": lambda key: policy.on_evicted([key]),
            }[name](key)
    victim = [key_of(number) for number in range(31)]
    chosen = policy.choose_copies(victim)
    assert chosen == [key for key in victim if key in set(chosen)]
    assert len(chosen) <= capacity / 4


def test_memory_does_not_grow_with_the_keys_that_pass() -> None:
    tracemalloc.start()
    try:
        policy = SecondChance(1000)
        at_start, _ = tracemalloc.get_traced_memory()
        for number in range(10_000):
            key = key_of(number)
            policy.on_stored(1)
            policy.on_hit(key)
            policy.on_evicted([key])
        at_end, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert at_start < 1000 * 8 + 4096
    assert at_end - at_start < 4096


def test_marks_are_kept_apart_when_every_chunk_of_the_root_is_hot() -> None:
    policy = make_policy(capacity=20_000, copies_per_store=10.0)
    keys = [key_of(number) for number in range(20_000)]
    policy.on_stored(len(keys))
    for key in keys:
        policy.on_hit(key)
    kept = sum(len(policy.choose_copies(keys[at : at + 100])) for at in range(0, 20_000, 100))
    others = [key_of(number) for number in range(30_000, 34_000)]
    assert kept >= 0.99 * len(keys)
    assert len(policy.choose_copies(others)) <= 4


def test_the_default_digest_needs_no_particular_keys() -> None:
    policy = SecondChance(100)
    keys = [f"key-{number:08}".encode() for number in range(50)]
    for key in keys:
        policy.on_hit(key)
    assert survivors(policy, keys) == []  # no store has paid for a copy
    policy.on_stored(1)
    assert survivors(policy, keys) == keys[:1]


@pytest.mark.parametrize(
    ("capacity", "copies", "named"),
    [
        (0, 0.5, "capacity_chunks=0"),
        (5, -0.1, "copies_per_store=-0.1"),
    ],
)
def test_bad_arguments_are_named(capacity: int, copies: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SecondChance(capacity, copies)


# --- against exact LRU, on a generated trace --------------------------------------------------


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import _simulation

    monkeypatch.delitem(sys.modules, "_simulation")
    return _simulation


@pytest.mark.parametrize("share_of_distinct", [0.05, 0.10, 0.20, 0.40])
def test_hits_are_those_of_exact_lru(simulation: ModuleType, share_of_distinct: float) -> None:
    """Over three traces together: a single small one is off by a percent either way."""
    lru, ours = simulation.Outcome(), simulation.Outcome()
    for seed in range(3):
        trace = simulation.make_conversations(3000, seed)
        capacity = int(share_of_distinct * simulation.distinct_chunks(trace))
        lru += simulation.replay_lru(trace, capacity)
        ours += simulation.replay_segments(trace, capacity)
    assert ours.lookups == lru.lookups
    assert ours.hits >= 0.97 * lru.hits
    assert ours.writes <= 1.5 * lru.writes


def test_without_copies_the_hits_are_far_from_lru(simulation: ModuleType) -> None:
    trace = simulation.make_conversations(4000, seed=7)
    capacity = int(0.10 * simulation.distinct_chunks(trace))
    lru = simulation.replay_lru(trace, capacity)
    fifo = simulation.replay_segments(trace, capacity, make_policy(capacity, 0.0))
    assert fifo.moved == 0
    assert fifo.hits < 0.9 * lru.hits


def test_the_simulated_disk_never_holds_more_than_its_capacity(simulation: ModuleType) -> None:
    capacity = 640
    disk = simulation.SimulatedDisk(capacity, make_policy(capacity))
    for request in simulation.make_conversations(300, seed=1):
        disk.serve(request)
        assert disk.held_chunks <= capacity
    assert disk.held_chunks > 0.9 * capacity  # and it was full
