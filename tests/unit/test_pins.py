# SPDX-License-Identifier: Apache-2.0
"""Pins, room and open transfers: bookkeeping without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.pins import Admission, PinBook, PinSettings
from vllm_tiered_offload.room import Room
from vllm_tiered_offload.transfers import OpenTransfers

ALL = PinSettings(max_share=1.0, store_headroom=0.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keys(count: int, start: int = 0, group: int = 0) -> list[bytes]:
    return [
        i.to_bytes(8, "big") + group.to_bytes(4, "big") for i in range(start, start + count)
    ]


class Pool:
    """A book, its room, and requests by name."""

    def __init__(self, chunks: int, settings: PinSettings = ALL, groups: int = 1) -> None:
        self.clock = Clock()
        self.book = PinBook(settings, self.clock)
        self.room = Room(chunks, self.book, groups)
        self.chunks = chunks

    def request(self, name: str, **options: Any) -> Admission:
        self.book.admit(name, context := object(), **options)
        admission = self.book.find(name, context)
        assert admission is not None
        return admission

    def ask(self, admission: Admission, *asked: bytes, free: int | None = None) -> list[str]:
        """Verdicts; `free` counts what is neither pinned nor being filled."""
        if free is None:
            counts = self.book.counts()
            free = self.chunks - counts["pinned"] - counts["flying"]
        return [self.room.ask(admission, key, 0, free).name for key in asked]

    def launch(self) -> None:
        for admission in self.book.end_step():
            self.book.pin(admission, self.room.pinnable_hits(admission))
            self.book.launched(admission, self.book.drop_queue(admission).keys())

    def land(self, admission: Admission, failed: tuple[bytes, ...] = ()) -> list[bytes]:
        flying = list(admission.flying)
        ok = [key for key in flying if key not in failed]
        self.book.pin(admission, pinned := self.book.landed(admission, flying, ok))
        return pinned


# --- settings ---


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"max_share": 0.0}, "pin_share"),
        ({"max_share": 1.1}, "pin_share"),
        ({"max_share": float("nan")}, "pin_share"),
        ({"deadline": 0.0}, "pin_deadline"),
        ({"deadline": float("nan")}, "pin_deadline"),
        ({"patience": -0.1}, "patience"),
        ({"patience": float("nan")}, "patience"),
        ({"store_headroom": 1.0}, "store_headroom"),
        ({"store_headroom": -0.1}, "store_headroom"),
    ],
)
def test_bad_settings_name_the_key(values: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        PinSettings(**values)


@given(
    chunks=st.integers(0, 10_000),
    share=st.floats(0.001, 1.0),
    headroom=st.floats(0.0, 0.999),
)
def test_cap_and_head_room(chunks: int, share: float, headroom: float) -> None:
    room = Room(chunks, PinBook(PinSettings(max_share=share, store_headroom=headroom)))
    assert room.cap <= max(1, chunks * share)
    assert (room.cap >= 1) == (chunks >= 1)
    assert 0 <= room.headroom < max(1, chunks)


# --- who a request is ---


def test_a_namesake_is_another_request() -> None:
    pool = Pool(4)
    old = pool.request("r")
    new = pool.request("r")
    assert new is not old
    assert pool.book.find("r", old.request) is None
    assert pool.book.find("r", new.request) is new
    pool.book.forget("r")
    assert pool.book.find("r", new.request) is None


# --- taking room ---


def test_room_ends_at_the_cap_and_stays_ended() -> None:
    pool = Pool(10, PinSettings(max_share=0.5, store_headroom=0.0, patience=0))
    a = pool.request("a")
    assert pool.ask(a, *keys(7)) == ["TAKE"] * 5 + ["FULL", "REFUSE"]
    pool.launch()
    assert pool.ask(a, keys(7)[5]) == ["REFUSE"]
    pool.land(a)
    assert pool.book.counts()["pinned"] == 5


def test_head_room_is_left() -> None:
    pool = Pool(10, PinSettings(max_share=1.0, store_headroom=0.3, patience=0))
    assert pool.ask(pool.request("a"), *keys(9)).count("TAKE") == 7


def test_rows_busy_with_other_things_are_no_room() -> None:
    pool = Pool(10, PinSettings(max_share=1.0, store_headroom=0.0, patience=0))
    assert pool.ask(pool.request("a"), *keys(9), free=4).count("TAKE") == 4


def test_the_requests_own_hits_are_taken_into_account() -> None:
    pool = Pool(10, PinSettings(max_share=1.0, store_headroom=0.0, patience=0))
    a = pool.request("a")
    for key in keys(6):
        pool.book.saw_hit(a, key)
        pool.book.saw_hit(a, key)  # a second search in the same step
    assert pool.ask(a, *keys(9, start=6)).count("TAKE") == 4
    pool.launch()
    assert (len(a.pinned), len(a.flying)) == (6, 4)


def test_a_key_is_tried_once_whatever_came_of_it() -> None:
    pool = Pool(10)
    a = pool.request("a")
    first, second = keys(2)
    pool.ask(a, first, second)
    pool.launch()
    assert pool.land(a, failed=(second,)) == [first]
    assert pool.ask(a, first, second) == ["REFUSE", "REFUSE"]
    assert pool.book.end_admission(a) == [first]
    assert pool.ask(a, first, second) == ["TAKE", "TAKE"]  # another admission


def test_pins_of_two_requests_on_one_chunk_count_once_and_end_apart() -> None:
    pool = Pool(10)
    a, b = pool.request("a"), pool.request("b")
    shared = keys(1)
    pool.book.pin(a, shared)
    pool.book.pin(b, shared)
    assert pool.book.held == 1
    assert pool.book.release(a) == shared
    assert pool.book.held == 1
    assert pool.book.release(b) == shared
    assert pool.book.held == 0


def test_a_promotion_of_an_earlier_admission_pins_nothing() -> None:
    pool = Pool(10)
    a = pool.request("a")
    pool.ask(a, *keys(3))
    pool.launch()
    pool.book.end_admission(a)
    assert pool.book.landed(a, keys(3), keys(3)) == []
    assert pool.book.landed(None, keys(3), keys(3)) == []
    assert pool.book.held == 0


# --- the deadline ---


def test_pins_are_overdue_after_the_deadline_and_not_before() -> None:
    pool = Pool(10, PinSettings(max_share=1.0, store_headroom=0.0, deadline=5.0))
    a, b = pool.request("a"), pool.request("b")
    for admission, own in ((a, keys(3)), (b, keys(3, start=3))):
        pool.ask(admission, *own)
        pool.launch()
        pool.land(admission)
        pool.clock.now += 3.0
    assert pool.book.overdue() == [a]
    pool.book.release(a)
    assert pool.book.overdue() == []
    pool.clock.now += 2.1
    assert pool.book.overdue() == [b]


def test_an_expired_admission_gets_no_pins_for_what_lands_later() -> None:
    pool = Pool(10, PinSettings(max_share=1.0, store_headroom=0.0, deadline=5.0))
    a = pool.request("a")
    pool.ask(a, keys(1)[0])
    pool.launch()
    pool.land(a)
    pool.ask(a, keys(1, start=1)[0])
    pool.launch()
    pool.clock.now += 6.0
    for admission in pool.book.overdue():
        pool.book.release(admission)
    assert pool.land(a) == []


def test_a_promotion_is_stuck_after_the_deadline() -> None:
    pool = Pool(10, PinSettings(max_share=1.0, store_headroom=0.0, deadline=5.0))
    a = pool.request("a")
    pool.ask(a, *keys(1))
    pool.launch()
    pool.clock.now += 5.1
    pool.book.end_step()
    assert pool.book.stuck == set(keys(1))
    pool.land(a)
    pool.book.end_step()
    assert pool.book.stuck == set()


# --- patience ---


def hold(pool: Pool, count: int) -> Admission:
    """Another request that holds `count` chunks."""
    other = pool.request("other")
    pool.book.launched(other, keys(count, start=1000))
    return other


def test_waiting_gives_the_queue_back_and_ends_when_there_is_more_room() -> None:
    pool = Pool(10)
    other = hold(pool, 7)
    a = pool.request("a")
    assert pool.ask(a, *keys(5)) == ["TAKE"] * 3 + ["WAIT", "REFUSE"]
    assert not pool.book.queued
    assert pool.ask(a, *keys(5)) == ["WAIT"] + ["REFUSE"] * 4  # the same step
    pool.launch()
    assert pool.ask(a, *keys(5)) == ["WAIT"] + ["REFUSE"] * 4  # the next one
    pool.launch()
    pool.land(other)
    pool.book.end_admission(other)
    assert pool.ask(a, *keys(5)) == ["TAKE"] * 5


def test_who_holds_pins_never_waits() -> None:
    pool = Pool(10)
    a = pool.request("a")
    pool.ask(a, *keys(2))
    pool.launch()
    hold(pool, 8)
    assert pool.ask(a, *keys(2, start=2)) == ["FULL", "REFUSE"]


def test_most_of_what_could_be_had_is_enough() -> None:
    pool = Pool(100)
    hold(pool, 25)
    assert pool.ask(pool.request("a"), *keys(80))[74:77] == ["TAKE", "FULL", "REFUSE"]
    pool = Pool(100)
    hold(pool, 26)
    assert pool.ask(pool.request("a"), *keys(80))[73:76] == ["TAKE", "WAIT", "REFUSE"]


def test_what_others_have_read_meanwhile_may_be_enough() -> None:
    pool = Pool(100)
    hold(pool, 100)
    a = pool.request("a")
    for resident, verdict in ((0, "WAIT"), (74, "WAIT"), (75, "FULL")):
        for key in keys(resident):
            pool.book.saw_hit(a, key)
        assert pool.ask(a, *keys(5, start=resident), free=0)[0] == verdict
        pool.launch()
    assert pool.book.waits.ended["in_time"] == 1


def test_with_windows_most_is_not_enough() -> None:
    # A part of a prefix is of use only where a window ends.
    pool = Pool(100, groups=2)
    hold(pool, 5)
    assert "WAIT" in pool.ask(pool.request("a"), *keys(100))


def test_patience_counts_over_the_whole_admission() -> None:
    pool = Pool(10, PinSettings(max_share=1.0, store_headroom=0.0, patience=1.0))
    hold(pool, 8)
    a = pool.request("a")
    for _ in range(10):
        assert "WAIT" in pool.ask(a, *keys(5))
        pool.launch()
        pool.clock.now += 0.09
    pool.clock.now += 0.2
    assert pool.ask(a, *keys(5)) == ["TAKE", "TAKE", "FULL", "REFUSE", "REFUSE"]
    pool.book.end_admission(a)
    assert "WAIT" in pool.ask(a, *keys(5))


@pytest.mark.parametrize("options", [{"may_wait": False}, {}])
def test_some_never_wait(options: dict[str, bool]) -> None:
    patience = 0.0 if not options else 10.0
    pool = Pool(10, PinSettings(max_share=1.0, store_headroom=0.0, patience=patience))
    hold(pool, 10)
    assert pool.ask(pool.request("a", **options), *keys(2)) == ["FULL", "REFUSE"]


# --- several groups ---


def test_every_group_of_a_waiting_request_waits_at_its_first_key() -> None:
    pool = Pool(10, groups=2)
    hold(pool, 10)
    a = pool.request("a")
    one, two = keys(3), keys(3, group=1)
    for _ in range(2):
        assert pool.ask(a, *one, *two) == ["WAIT", "REFUSE", "REFUSE"] * 2
        pool.launch()


def test_without_positions_groups_wait_until_the_cut_is_known() -> None:
    pool = Pool(16, groups=2)
    a = pool.request("a")
    one, two = keys(20), keys(4, group=1)
    assert pool.ask(a, *one)[15:18] == ["TAKE", "FULL", "REFUSE"]
    assert list(a.queue) == one[:12]  # a quarter is given back for windows
    assert pool.ask(a, *two) == ["WAIT"] + ["REFUSE"] * 3
    pool.launch()
    pool.land(a)
    assert pool.ask(a, *two) == ["TAKE"] * 4


def test_with_positions_nothing_is_taken_beyond_the_cut() -> None:
    pool = Pool(16, groups=2)
    a = pool.request("a")
    one, two = keys(20), keys(20, group=1)
    position_of = {key: i for group in (one, two) for i, key in enumerate(group, 1)}.get
    for key in one:
        pool.room.ask(a, key, 0, 16, position_of)
    assert a.limit == 13
    verdicts = [pool.room.ask(a, key, 0, 16, position_of).name for key in reversed(two)]
    assert verdicts[:8] == ["REFUSE"] * 8
    assert verdicts[8:12] == ["TAKE"] * 4


def test_a_window_without_room_cuts_the_prefix_that_took_it_all() -> None:
    pool = Pool(16, groups=2)
    a = pool.request("a")
    one, two = keys(16), keys(16, group=1)
    position_of = {key: i for group in (one, two) for i, key in enumerate(group, 1)}.get
    for key in (*one, *reversed(two[8:])):
        pool.room.ask(a, key, 0, 16, position_of)
    assert a.limit == 13
    assert list(a.queue) == [*one[:12], *reversed(two[8:12])]


# --- everything comes back ---


@given(st.data())
def test_nothing_is_left_when_all_requests_are_gone(data: st.DataObject) -> None:
    pool = Pool(
        data.draw(st.integers(1, 20)),
        PinSettings(
            max_share=data.draw(st.floats(0.1, 1.0)),
            store_headroom=data.draw(st.floats(0.0, 0.5)),
            patience=data.draw(st.sampled_from([0.0, 1.0])),
            deadline=1.0,
        ),
        groups=data.draw(st.integers(1, 2)),
    )
    alive: list[Admission] = []
    for number in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["new", "ask", "hit", "step", "land", "end", "time"]))
        if what == "new":
            alive.append(pool.request(str(number)))
        elif what == "time":
            pool.clock.now += data.draw(st.sampled_from([0.4, 2.0]))
            for admission in pool.book.overdue():
                pool.book.release(admission)
        elif what == "step":
            pool.launch()
        elif alive:
            admission = data.draw(st.sampled_from(alive))
            some = keys(data.draw(st.integers(1, 25)), group=data.draw(st.integers(0, 1)))
            if what == "ask":
                missing = [k for k in some if k not in pool.book.queued]
                pool.ask(admission, *(k for k in missing if k not in pool.book._flying))
            elif what == "hit":
                for key in some:
                    if key not in pool.book.queued and key not in pool.book._flying:
                        pool.book.saw_hit(admission, key)
            elif what == "land":
                pool.land(admission)
            else:
                pool.book.end_admission(admission)
        assert pool.book.held <= pool.room.cap
    pool.book.end_step()
    for admission in alive:
        pool.book.landed(None, list(pool.book._flying), [])
        pool.book.end_admission(admission)
    counts = pool.book.counts()
    assert {**counts, "requests": 0} == dict.fromkeys(counts, 0)


# --- transfers ---


def test_a_load_is_closed_once_for_each_time_it_was_opened() -> None:
    transfers = OpenTransfers()
    one, two = keys(2)
    transfers.open_load("a", [one, two])
    transfers.open_load("b", [one])
    assert transfers.close_load("a", [one, two]) == [one, two]
    assert transfers.close_load("a", [one]) == []
    assert transfers.close_load("c", [one]) == []
    assert transfers.close_load("b", [two, one]) == [one]
    assert len(transfers) == 0


def test_a_store_is_closed_once_and_knows_its_request() -> None:
    transfers = OpenTransfers()
    one, two = keys(2)
    a, b = object(), object()
    transfers.open_store(a, [one])
    transfers.open_store(b, [two])
    assert transfers.close_store([one, two, *keys(1, start=5)]) == {one: a, two: b}
    assert transfers.close_store([one]) == {}
    assert len(transfers) == 0
