# SPDX-License-Identifier: Apache-2.0
"""Prefix order of a job's keys, on vLLM with and without positions."""

from __future__ import annotations

import random
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.fs_tier.ordering import PrefixOrder


def key(number: int, group: int = 0) -> bytes:
    # Descending first bytes: byte order alone must not give the right answer.
    return (255 - number).to_bytes(32, "big") + group.to_bytes(4, "big")


def with_positions(positions: dict[bytes, int]) -> SimpleNamespace:
    return SimpleNamespace(req_id="r", get_offload_key_position=positions.get)


def without_positions(req_id: str = "r") -> SimpleNamespace:
    return SimpleNamespace(req_id=req_id)


@given(st.permutations(range(20)), st.integers(1, 3))
def test_keys_come_by_group_then_position_and_keep_their_rows(
    shuffled: list[int], groups: int
) -> None:
    keys = [key(n, n % groups) for n in range(20)]
    positions = {at: 16 * (n + 1) for n, at in enumerate(keys)}
    given_keys = [keys[n] for n in shuffled]
    found, rows = PrefixOrder().sort(given_keys, shuffled, with_positions(positions))
    wanted = sorted(range(20), key=lambda n: (n % groups, n))
    assert rows == wanted
    assert found == [keys[n] for n in wanted]


def test_a_set_is_matched_with_its_rows_in_its_own_order() -> None:
    keys = {key(n): n for n in range(50)}
    as_set = set(keys)
    rows = [keys[at] for at in as_set]
    positions = dict(keys)
    found, found_rows = PrefixOrder().sort(as_set, rows, with_positions(positions))
    assert found_rows == list(range(50))
    assert [keys[at] for at in found] == found_rows


def test_keys_of_unknown_position_come_last_in_the_order_given() -> None:
    known, first, second = key(1), key(2), key(3)
    found, _ = PrefixOrder().sort(
        [first, second, known], [0, 1, 2], with_positions({known: 16})
    )
    assert found == [known, first, second]


def test_position_zero_is_a_position() -> None:
    start, later, unknown = key(1), key(2), key(3)
    positions = {start: 0, later: 16}
    found, _ = PrefixOrder().sort([unknown, later, start], [0, 1, 2], with_positions(positions))
    assert found == [start, later, unknown]


def test_without_positions_the_order_of_touch_counts() -> None:
    order, keys = PrefixOrder(), [key(n) for n in range(30)]
    order.record(without_positions(), keys[:10])
    order.record(without_positions(), keys)  # vLLM names the whole prompt each time
    shuffled = random.Random(1).sample(range(30), 30)
    found, rows = order.sort([keys[n] for n in shuffled], shuffled, without_positions())
    assert found == keys
    assert rows == list(range(30))


def test_requests_are_kept_apart_and_forgotten() -> None:
    order, keys = PrefixOrder(), [key(n) for n in range(3)]
    order.record(without_positions("a"), keys)
    order.record(without_positions("b"), reversed(keys))
    assert order.sort(keys, [0, 1, 2], without_positions("b"))[0] == keys[::-1]
    order.forget("b")
    order.forget("never seen")
    assert order.sort(keys, [0, 1, 2], without_positions("b"))[0] == keys
    assert order.sort(keys[::-1], [0, 1, 2], without_positions("a"))[0] == keys


def test_touch_records_nothing_where_vllm_knows_positions() -> None:
    order, keys = PrefixOrder(), [key(n) for n in range(3)]
    order.record(with_positions({}), keys[::-1])
    assert order.sort(keys, [0, 1, 2], without_positions())[0] == keys
