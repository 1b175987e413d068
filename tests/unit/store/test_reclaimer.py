# SPDX-License-Identifier: Apache-2.0
"""What the reclaimer decides when a writer, a look-up or another thread comes in between."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import KIB, MIB, Engine, keys, wait_for

from vllm_tiered_offload.store import faults
from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.hits import Hits
from vllm_tiered_offload.store.index import Index
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.reclaimer import Reclaimer
from vllm_tiered_offload.store.segment import Segment, State
from vllm_tiered_offload.store.syscalls import Syscalls
from vllm_tiered_offload.store.watch import FIRST_PAUSE, Pause

SMALL: dict[str, object] = {"max_bytes": 16 * MIB, "segment_bytes": 512 * KIB}


def reclaimer_of(engine: Engine) -> Reclaimer:
    return engine.store._disks[0]._reclaimer


def fill(engine: Engine, start: int = 0) -> None:
    """Until the root is full and the reclaimer has freed what it keeps free."""
    for first in range(start, start + 1200, 60):
        engine.put(keys(60, first))
    (stats,) = engine.store.stats().roots
    wait_for(lambda: engine.store.stats().roots[0].used_slots <= stats.slots - 2)


def test_no_copy_is_made_while_a_writer_waits(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading hot chunks out of one segment after the other would keep it from the slot."""
    with Engine(root, **SMALL) as engine:
        fill(engine)
        engine.held(keys(1200))
        reclaiming, reads = reclaimer_of(engine), []
        monkeypatch.setattr(reclaiming._copier, "_fetch", lambda *wanted: reads.append(wanted))
        with reclaiming.turn:
            reclaiming._starving.add(0)
            assert not reclaiming._evict_prepared()  # there are slots: nothing has to go
            victim = engine.store._disks[0].parts.catalogue.closed()[0]
            assert not reclaiming._copier.copy_hot(victim)
            monkeypatch.setattr(reclaiming, "_may_wait", lambda: False)
            before = engine.counter("evicted_segments")
            assert reclaiming._evict_prepared()
            reclaiming._starving.clear()
        assert reads == []
        assert engine.counter("evicted_segments") == before + 1


def test_a_segment_that_was_being_read_is_not_evicted_unprepared_without_need(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(root, **SMALL) as engine:
        fill(engine)
        reclaiming = reclaimer_of(engine)
        closed = engine.store._disks[0].parts.catalogue.closed()
        held = engine.held(keys(1200))
        with reclaiming.turn:
            for segment in closed:
                segment.loads += 1
            candidates = reclaiming._candidates()
            monkeypatch.setattr(reclaiming, "_candidates", lambda: candidates)
            done = iter(closed)

            def look(segment: Segment) -> bool:
                next(done).loads -= 1  # the loads end while it looks
                return False

            monkeypatch.setattr(reclaiming, "_is_cold", look)
            assert not reclaiming._evict_prepared()
            for segment in done:
                segment.loads -= 1
        assert engine.get(held) == held


def test_a_hit_while_the_root_lock_is_waited_for_saves_the_segment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(200))
        reclaiming, slots = reclaimer_of(engine), engine.store._disks[0].parts.slots
        claim, hits = slots.claim, []

        def hit_and_claim(path: str, sequence: int) -> object:
            if not hits:
                hits.extend(engine.held(keys(1)))
            return claim(path, sequence)

        monkeypatch.setattr(slots, "claim", hit_and_claim)
        with reclaiming.turn:
            reclaiming._evict_prepared()
        assert hits == keys(1)
        assert engine.get(keys(1)) == keys(1)


def test_a_drain_waits_for_the_hits_that_another_thread_has_taken(root: Path) -> None:
    """They mark their segments only when it comes to them, and the reclaimer looks now."""
    index = Index()
    header = fmt.PageBlock(
        fmt.SEGMENT_MAGIC, 4096, MIB, 1, 0, 4096, 0, False, 0, 0, "0" * 32
    )  # fmt: skip
    segment = Segment(0, "path", header, State.CLOSED)
    index.register(segment)
    index.add(segment, keys(2), [4096, 8192], [0, 0])
    taken, proceed, drained = threading.Event(), threading.Event(), threading.Event()

    def slow_hit(_: bytes) -> None:
        taken.set()
        proceed.wait()

    parts = SimpleNamespace(
        policy_lock=threading.Lock(), policy=SimpleNamespace(on_hit=slow_hit)
    )
    hits = Hits(index, lambda: 7.0)
    hits.note_all(keys(2))
    refresher = threading.Thread(target=lambda: hits.drain([parts]))  # type: ignore[list-item]
    refresher.start()
    assert taken.wait(5)
    reclaiming = threading.Thread(
        target=lambda: (hits.drain([parts]), drained.set())  # type: ignore[list-item]
    )
    reclaiming.start()
    assert not drained.wait(0.1)
    proceed.set()
    assert drained.wait(5)
    for thread in (refresher, reclaiming):
        thread.join()


def test_a_load_whose_chunk_moves_between_look_and_claim_finds_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(60))
        claim, moved = engine.store._claim, []

        def gone_at_first(ordinal: int, loads: int) -> Segment | None:
            if not moved:
                moved.append(ordinal)
                return None
            return claim(ordinal, loads)

        monkeypatch.setattr(engine.store, "_claim", gone_at_first)
        assert sorted(engine.get(keys(60))) == sorted(keys(60))
        assert moved
        assert engine.store.stats().failed_chunks == {}


def test_no_more_goes_at_once_than_is_missing(root: Path) -> None:
    """A file system may give space back late, or never while there is a snapshot."""

    class LateSpace(Syscalls):
        free = 1 << 40

        def free_bytes(self, path: str) -> int:
            return self.free

    calls = LateSpace()
    settings = {**SMALL, "min_free_bytes": 10 * MIB, "refresh_interval": 60.0}
    with Engine(root, syscalls=calls, **settings) as engine:
        engine.put(keys(300))
        before = engine.store.stats().roots[0].used_slots
        calls.free = 10 * MIB  # two segments are to be free, and nothing changes that
        reclaimer_of(engine).keep_slots_free()
        assert engine.store.stats().roots[0].used_slots == before - 2


def test_what_was_not_rescued_for_want_of_room_is_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(root, **SMALL) as engine:
        fill(engine)
        reclaiming, parts = reclaimer_of(engine), engine.store._disks[0].parts
        oldest = parts.catalogue.closed()[0]
        hot = oldest.keys[:5]
        parts.others_store_until = parts.clock() + 60
        engine.held(hot)
        with monkeypatch.context() as patch:
            patch.setattr(reclaiming._copier, "_room", lambda: 2)
            reclaiming._rescue_from_others()
        reclaiming._rescue_from_others()
        assert not parts.index.still_there(oldest, range(5))
        assert engine.store.stats().copied_chunks >= 5
        assert engine.get(hot) == hot


def test_the_only_segment_left_to_evict_may_still_be_sealed(root: Path) -> None:
    """Slots of others cannot go: the writer waits for its own seal, and drops nothing."""
    tiny = {"max_bytes": 2900 * KIB, "segment_bytes": 512 * KIB}
    with Engine(root, **tiny) as one, Engine(root, **tiny) as two:
        one.put(keys(5))
        two.put(keys(5, 10))
        with Engine(root, **tiny) as engine:
            (stats,) = engine.store.stats().roots
            assert (stats.slots, stats.used_slots) == (3, 2)
            faults.arm("segment.before_trailer=sleep:0.2")
            engine.put(keys(60, 100))
            faults.arm("")
            assert engine.store.stats().dropped_chunks == {}
            assert engine.get(keys(1, 159)) == keys(1, 159)


def test_a_pause_grows_with_tries_and_not_with_what_was_queued() -> None:
    now = [0.0]
    pause = Pause("here", lambda: now[0])
    for _ in range(10):
        pause.begin("ENOSPC")
    now[0] = FIRST_PAUSE
    assert not pause.active
    pause.begin("ENOSPC")
    now[0] += 1.5 * FIRST_PAUSE
    assert pause.active
    now[0] += 0.5 * FIRST_PAUSE
    assert not pause.active


def test_a_store_begun_before_the_failure_ends_no_pause() -> None:
    """Of two writers one may have room left where the other has none: no flicker of it."""
    now = [0.0]
    pause = Pause("here", lambda: now[0])
    pause.begin("all slots are in use")
    pause.end()
    assert pause.active
    now[0] = FIRST_PAUSE
    pause.end()
    assert pause.reason is None


@pytest.mark.parametrize("writers", [1, 2])
def test_stores_go_on_though_everything_is_hit_and_no_copy_may_be_made(
    root: Path, writers: int
) -> None:
    with Engine(root, write_threads=writers, io_bytes=64 * KIB, **SMALL) as engine:
        engine.store._disks[0].parts.policy.copies_per_store = 0.0
        for start in range(0, 1800, 30):
            engine.put(keys(30, start))
            engine.held(keys(1800))
        assert engine.store.stats().dropped_chunks == {}
        assert engine.counter("evicted_segments") > 20
        assert engine.held(keys(30, 1770)) == keys(30, 1770)


def test_the_reclaimer_rests_while_it_has_to_wait(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short of slots, and nothing may go for now: it looks once each time it is woken."""
    with Engine(root, **{**SMALL, "refresh_interval": 60.0}) as engine:
        engine.put(keys(600))
        reclaiming, looks = reclaimer_of(engine), []
        monkeypatch.setattr(reclaiming, "_slots_ahead", lambda: 20)
        monkeypatch.setattr(reclaiming, "_prepare", lambda *_: looks.append(1) or False)
        monkeypatch.setattr(reclaiming, "_may_wait", lambda: True)
        for _ in range(3):
            reclaiming.keep_slots_free()
        assert len(looks) == 3


def test_a_copy_goes_to_the_writer_that_has_room(root: Path) -> None:
    """The other, which has no segment at all, must not take it only to drop it."""
    settings = {**SMALL, "refresh_interval": 60.0, "write_threads": 2}
    with Engine(root, **settings) as engine:
        engine.put(keys(40))  # one piece, thus one writer
        disk = engine.store._disks[0]
        assert sorted(writer.open.room() > 0 for writer in disk._writers) == [False, True]
        wait_for(disk.parts.catalogue.closed)  # sealed beside the next
        (oldest,) = disk.parts.catalogue.closed()
        for hot in keys(10):
            engine.held([hot])
            disk.parts.drain_hits()
            with disk._reclaimer.turn:
                assert disk._reclaimer._copier.copy_hot(oldest)
        assert engine.store.stats().copied_chunks == 10
        assert engine.get(keys(40)) == keys(40)


def test_a_copy_that_finds_no_room_is_taken_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(root, **{**SMALL, "refresh_interval": 60.0}) as engine:
        engine.put(keys(40))
        disk = engine.store._disks[0]
        wait_for(disk.parts.catalogue.closed)  # sealed beside the next
        (oldest,) = disk.parts.catalogue.closed()
        engine.held(keys(10))
        disk.parts.drain_hits()
        room = iter([10])
        monkeypatch.setattr(disk._reclaimer._copier, "_room", lambda: next(room, 0))
        monkeypatch.setattr(disk._writers[0].open, "room", lambda: 0)
        engine.put(keys(1, 100))  # the writer looks again
        with disk._reclaimer.turn:
            assert not disk._reclaimer._copier.copy_hot(oldest)
        assert not disk.parts.pool._copies
        assert engine.get(keys(40)) == keys(40)


def test_a_slot_counts_as_taken_once_its_segment_has_room_to_offer(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the reclaimer sees neither slots nor room, and evicts what it could have copied."""
    rooms: list[int] = []
    made = Parts.made

    def look_and_make(self: Parts, segment: Segment) -> None:
        rooms.append(engine.store._disks[0]._room())
        made(self, segment)

    monkeypatch.setattr(Parts, "made", look_and_make)
    with Engine(root, **SMALL) as engine:
        engine.put(keys(60))
    assert len(rooms) >= 2
    assert all(rooms)
