# SPDX-License-Identifier: Apache-2.0
"""Waits are counted once each, with their seconds."""

from __future__ import annotations

from vllm_tiered_offload.waits import GONE, IN_TIME, OUT_OF_PATIENCE, OUTCOMES, Waits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_lasts_from_its_first_begin_to_its_first_end() -> None:
    waits = Waits(clock := Clock())
    waits.begin("a")
    clock.now = 1.0
    waits.begin("a")
    assert len(waits) == 1
    clock.now = 3.0
    waits.end("a", IN_TIME)
    waits.end("a", OUT_OF_PATIENCE)
    assert len(waits) == 0
    assert waits.ended == {IN_TIME: 1, OUT_OF_PATIENCE: 0, GONE: 0}
    assert waits.seconds == {IN_TIME: 3.0, OUT_OF_PATIENCE: 0.0, GONE: 0.0}


def test_who_waits_again_is_counted_again() -> None:
    waits = Waits(clock := Clock())
    for outcome in (OUT_OF_PATIENCE, GONE, GONE):
        waits.begin("a")
        clock.now += 2.0
        waits.end("a", outcome)
    assert waits.ended == {IN_TIME: 0, OUT_OF_PATIENCE: 1, GONE: 2}
    assert waits.seconds == {IN_TIME: 0.0, OUT_OF_PATIENCE: 2.0, GONE: 4.0}


def test_the_end_of_no_wait_is_nothing() -> None:
    waits = Waits(Clock())
    for outcome in OUTCOMES:
        waits.end("a", outcome)
    assert not any(waits.ended.values())
