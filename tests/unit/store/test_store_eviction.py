# SPDX-License-Identifier: Apache-2.0
"""Eviction as the store does it: order, second chances, what it must not touch."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from harness import KIB, MIB, Engine, keys, segments, wait_for

from vllm_tiered_offload.store import format as fmt

SMALL: dict[str, object] = {"max_bytes": 16 * MIB, "segment_bytes": 512 * KIB}


def has_a_free_slot(engine: Engine) -> bool:
    (stats,) = engine.store.stats().roots
    return stats.used_slots < stats.slots


def sequences(root: Path) -> list[int]:
    found = []
    for path in segments(root):
        try:
            page = path.read_bytes()[:4096]
            found.append(fmt.unpack_page_block(page, fmt.SEGMENT_MAGIC).sequence)
        except (FileNotFoundError, fmt.FormatError):
            continue
    return sorted(found)


def test_the_oldest_segments_go_whatever_their_times(root: Path) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(200))
        for path in segments(root):
            os.utime(path, (2e9, 2e9) if path.name < "000003" else (0, 0))
        for start in range(1000, 2000, 50):
            engine.put(keys(50, start))
        left = sequences(root)
        assert left[0] > 7
        assert left == list(range(left[0], left[-1] + 1))
        assert engine.held(keys(200)) == []


def test_chunks_that_are_hit_survive_and_others_do_not(root: Path) -> None:
    hot = keys(20)
    with Engine(root, **SMALL) as engine:
        engine.put([*hot, *keys(200, 100)])
        for start in range(1000, 2500, 5):  # many jobs a segment, as on a real disk
            engine.held(hot)
            engine.put(keys(5, start))
            wait_for(lambda: has_a_free_slot(engine))  # no disk outruns the reclaimer
        assert engine.get(hot) == hot
        assert engine.held(keys(200, 100)) == []
        assert engine.store.stats().copied_chunks >= 20


def test_hot_chunks_wait_for_a_segment_with_room(root: Path) -> None:
    """With a slot in reserve there is no need to evict before all of them have moved."""
    with Engine(root, **SMALL) as engine:
        hot, start = keys(31), 1000
        engine.put(hot)
        while (
            engine.store.stats().roots[0].used_slots < engine.store.stats().roots[0].slots - 2
        ):
            engine.put(keys(5, start))
            start += 5
        engine.held(hot)
        while not engine.counter("evicted_segments"):
            engine.put(keys(5, start))
            start += 5
            wait_for(lambda: has_a_free_slot(engine))
        assert (
            engine.store.stats().copied_chunks == 31
        )  # of which one segment could not hold all
        assert engine.get(hot) == hot


def test_a_rotten_chunk_is_not_made_good_by_copying(root: Path) -> None:
    """A copy carries the checksum it was stored with, and is verified on the way."""
    hot = keys(20)
    with Engine(root, direct_io="off", **SMALL) as engine:
        engine.put([*hot, *keys(20, 100)])
        path = segments(root)[0]
        with path.open("r+b") as file:
            file.seek(60_000)
            file.write(b"rot")
        for start in range(1000, 2500, 5):
            engine.held(hot)
            engine.put(keys(5, start))
            wait_for(lambda: has_a_free_slot(engine))
        assert len(engine.get(hot)) == 19  # every byte is checked by the harness


def test_a_segment_with_loads_in_flight_is_skipped(root: Path) -> None:
    from vllm_tiered_offload.store import faults

    with Engine(root, rows=64, **SMALL) as engine:
        engine.put(keys(28))
        faults.arm("reader.before_read=sleep:1.0")
        engine.start_load(keys(20))
        for n in range(40):
            engine.store.submit_store(1000 + n, keys(30, 1000 + 30 * n), list(range(30, 60)))
        wait_for(lambda: engine.counter("evicted_segments") > 5)
        assert sequences(root)[0] == 1
        engine.store.drain()
        (load,) = [done for done in engine.store.take_completions() if done.is_load]
        assert load.ok


def test_what_is_asked_for_all_the_time_moves_and_its_segment_goes(root: Path) -> None:
    """One hot chunk must not keep a whole segment, nor send younger ones before it."""
    with Engine(root, **SMALL) as engine:
        engine.put(keys(28))
        for start in range(1000, 3000, 5):
            assert engine.held(keys(1)) == keys(1)
            engine.put(keys(5, start))
            wait_for(lambda: has_a_free_slot(engine))
            left = sequences(root)
            assert left[-1] - left[0] < 34  # of 31 slots: they go in order
        assert engine.store.stats().copied_chunks >= 1
        assert engine.get(keys(1)) == keys(1)


def test_a_recent_hit_keeps_its_segment_for_a_moment(root: Path) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(28))
        for start in range(1000, 2000, 50):
            engine.held(keys(1))
            engine.put(keys(50, start))
        assert engine.held(keys(1)) == keys(1)
        assert engine.get(keys(1)) == keys(1)


def test_deletion_happens_on_another_thread(root: Path) -> None:
    from vllm_tiered_offload.store.syscalls import Syscalls

    threads: set[str] = set()

    class Watched(Syscalls):
        def unlink(self, path):  # type: ignore[no-untyped-def]
            if path.endswith(".seg"):
                threads.add(threading.current_thread().name)
            super().unlink(path)

    with Engine(root, syscalls=Watched(), **SMALL) as engine:
        engine.put(keys(2000))
    assert threads
    assert all(name.startswith("vto-disk0-") for name in threads)


def test_space_comes_back_while_a_reader_has_the_file_open(root: Path) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(60))
        fd = os.open(segments(root)[0], os.O_RDONLY)
        engine.put(keys(2000, 1000))
        assert os.fstat(fd).st_nlink == 0
        assert os.fstat(fd).st_blocks == 0
        os.close(fd)


@pytest.mark.root
def test_an_immutable_victim_is_skipped(root: Path) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(60))
        stuck = segments(root)[0]
        done = subprocess.run(["chattr", "+i", str(stuck)], check=False, capture_output=True)
        if done.returncode:
            pytest.skip("the file system has no immutable files")
        try:
            engine.put(keys(2000, 1000))
            assert engine.counter("undeletable_segments") == 1
            assert engine.store.stats().dropped_chunks == {}
            assert stuck.exists()
            held = engine.held(keys(28))
            assert len(held) > 20
            assert engine.get(held) == held  # it keeps serving
        finally:
            subprocess.run(["chattr", "-i", str(stuck)], check=True)


def test_evicted_keys_are_announced(root: Path) -> None:
    with Engine(root, events=True, **SMALL) as engine:
        known: set[bytes] = set()
        for start in range(0, 3000, 60):
            engine.put(keys(60, start))
        wait_for(lambda: engine.counter("evicted_segments") > 50)
        time.sleep(0.1)
        for event in engine.store.take_events():
            (known.difference_update if event.removed else known.update)(event.keys)
        assert known == set(engine.held(keys(3000)))


def test_no_descriptor_is_left_behind(root: Path) -> None:
    """Several threads open one segment at once; all but one descriptor must go."""
    for _ in range(5):
        with Engine(root, read_threads=8, io_bytes=64 * KIB) as engine:
            engine.put(keys(64))
            for _ in range(20):
                assert len(engine.get(keys(64))) == 64
    paths = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert not [path for path in paths if str(root) in path]


def test_descriptors_stay_few(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tiered_offload.store.descriptors.MOST_OPEN", 4)
    with Engine(root, **{**SMALL, "segment_bytes": 128 * KIB}) as engine:
        engine.store._disks[0].parts.descriptors._most = 4
        before = len(os.listdir("/proc/self/fd"))
        engine.put(keys(300))
        for _ in range(3):
            assert len(engine.get(keys(300))) == 300
        assert len(segments(root)) > 30
        assert len(os.listdir("/proc/self/fd")) - before <= 4 + 2 + 2


def test_a_writer_that_waited_for_an_eviction_takes_what_it_freed(root: Path) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(600))
        reclaiming = engine.store._disks[0]._reclaimer
        answers: list[bool] = []
        with reclaiming.turn:  # as the reclaimer's thread holds it during an eviction
            writer = threading.Thread(target=lambda: answers.append(reclaiming.free_one()))
            writer.start()
            wait_for(lambda: reclaiming._starving)
            before = engine.counter("evicted_segments")
            assert reclaiming._evict_coldest()
        writer.join()
        assert answers == [True]
        assert engine.counter("evicted_segments") == before + 1


def test_slots_are_freed_a_segment_ahead_of_need(root: Path) -> None:
    """So that there is time to copy what is hot. A root of few slots cannot afford it."""
    with Engine(root, **SMALL) as engine:
        for start in range(0, 2000, 60):
            engine.put(keys(60, start))
        (stats,) = engine.store.stats().roots
        wait_for(lambda: len(segments(root)) == stats.slots - 2)
    tiny = root.with_name("tiny")
    with Engine(tiny, max_bytes=4 * MIB, segment_bytes=512 * KIB) as engine:
        for start in range(0, 600, 60):
            engine.put(keys(60, start))
        (stats,) = engine.store.stats().roots
        wait_for(lambda: len(segments(tiny)) == stats.slots - 1)


def test_a_hit_while_its_segment_is_examined_saves_it_for_now(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up said HIT after the victim was chosen: its load is on the way."""
    with Engine(root, **SMALL) as engine:
        engine.put(keys(200))
        reclaiming = engine.store._disks[0]._reclaimer
        hits: list[bytes] = []

        def hit_meanwhile(victim: object) -> bool:
            hits.extend(engine.held(keys(1)))
            return True

        with reclaiming.turn, monkeypatch.context() as patch:
            patch.setattr(reclaiming._copier, "copy_hot", hit_meanwhile)
            assert not reclaiming._evict_prepared()
        assert hits == keys(1)
        assert engine.get(keys(200)) == keys(200)
