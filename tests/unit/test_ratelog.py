# SPDX-License-Identifier: Apache-2.0
"""One line per topic and interval, and a count of the rest."""

from __future__ import annotations

import logging

import pytest

from vllm_tiered_offload.ratelog import RateLimitedLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limited(clock: Clock, caplog: pytest.LogCaptureFixture) -> RateLimitedLog:
    caplog.set_level(logging.INFO)
    return RateLimitedLog(logging.getLogger("ratelog-test"), interval=60, clock=clock)


def test_repeats_are_suppressed_and_counted(
    limited: RateLimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert limited.warning("load", "%s failed", "a")
    clock.now = 59.9
    assert not limited.warning("load", "%s failed", "b")
    assert not limited.warning("load", "%s failed", "c")
    clock.now = 60.0
    assert limited.warning("load", "%s failed", "d")
    assert [r.getMessage() for r in caplog.records] == [
        "a failed",
        "d failed (2 similar lines suppressed)",
    ]


def test_the_count_starts_again(
    limited: RateLimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for clock.now in (0, 1, 60, 120):
        limited.warning("load", "failed")
    assert [r.getMessage() for r in caplog.records] == [
        "failed",
        "failed (1 similar lines suppressed)",
        "failed",
    ]


def test_topics_do_not_hide_each_other(
    limited: RateLimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    assert limited.warning(("load", "EIO"), "load")
    assert limited.info(("store", "EIO"), "store")
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


def test_percent_signs_in_arguments_stay_as_they_are(
    limited: RateLimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    limited.warning("x", "%s", "100 %s")
    limited.warning("x", "%s", "100 %s")
    clock.now = 60
    limited.warning("x", "%s", "100 %s")
    assert caplog.records[-1].getMessage() == "100 %s (1 similar lines suppressed)"
