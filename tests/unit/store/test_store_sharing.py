# SPDX-License-Identifier: Apache-2.0
"""Processes that use one root: they find each other's chunks and never each other's harm."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
from harness import (
    CHUNK,
    KIB,
    MIB,
    Engine,
    disk_usage,
    keys,
    process,
    segments,
    wait_for,
)

from vllm_tiered_offload.store import Namespace, faults, locks
from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.syscalls import Syscalls

SECONDS = float(os.environ.get("VTO_STRESS_SECONDS", "6"))
SMALL: dict[str, object] = {"max_bytes": 16 * MIB, "segment_bytes": 512 * KIB}


def test_a_chunk_is_found_from_a_segment_still_being_written(root: Path) -> None:
    with Engine(root, **SMALL) as writer, Engine(root, **SMALL) as reader:
        writer.put(keys(10))
        wait_for(lambda: reader.held(keys(10)) == keys(10), 2)
        assert reader.get(keys(10)) == keys(10)
        writer.put(keys(10, 10))
        wait_for(lambda: reader.held(keys(20)) == keys(20), 2)
        assert reader.get(keys(20)) == keys(20)
        assert reader.store.stats().failed_chunks == {}


def test_sealing_adds_nothing_twice(root: Path) -> None:
    with Engine(root, **SMALL) as reader:
        with Engine(root, **SMALL) as writer:
            writer.put(keys(20))
            wait_for(lambda: reader.held(keys(20)) == keys(20))
            writer.put(keys(60, 20))
        wait_for(lambda: reader.held(keys(80)) == keys(80))
        assert reader.store.stats().roots[0].chunks == 80
        assert reader.get(keys(80)) == keys(80)


def test_a_table_without_its_payload_is_not_believed(root: Path) -> None:
    """What another process may see in the middle of one write."""

    class HeadFirst(Syscalls):
        def __init__(self) -> None:
            self.gate = threading.Event()
            self.gate.set()

        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            if not self.gate.is_set():
                os.pwritev(fd, buffers[:1], offset)  # the table, and for a while no more
                self.gate.wait()
            return super().pwritev(fd, buffers, offset)

    calls = HeadFirst()
    with Engine(root, syscalls=calls, **SMALL) as writer, Engine(root, **SMALL) as reader:
        writer.put(keys(10))
        calls.gate.clear()
        writer.start_store(keys(10, 10))
        time.sleep(0.3)
        assert reader.held(keys(10, 10)) == []
        calls.gate.set()
        writer.finish()
        wait_for(lambda: reader.held(keys(20)) == keys(20))
        assert reader.get(keys(20)) == keys(20)
        assert reader.store.stats().failed_chunks == {}


def test_files_removed_by_hand_are_misses(root: Path) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(100))
        for path in segments(root):
            path.unlink()
        arrived = engine.get(keys(100))  # descriptors may still be open, or not
        assert set(engine.store.stats().failed_chunks) <= {"deleted", "unknown"}
        wait_for(lambda: engine.held(keys(100)) == [])
        missed = engine.store.stats().failed_chunks.get("deleted", 0)
        assert engine.counter("lost_chunks") + missed >= 100 - len(arrived)
        engine.put(keys(100))  # into a new file, not into the one that is gone
        assert engine.get(keys(100)) == keys(100)
        assert segments(root)


def test_evicted_by_another_process_is_a_miss(root: Path) -> None:
    with Engine(root, **SMALL) as one, Engine(root, **SMALL) as two:
        one.put(keys(100))
        wait_for(lambda: two.store.stats().chunks >= 50)  # without a hit: none is hot
        for start in range(1000, 4000, 500):
            two.put(keys(500, start))
        one.get(keys(100))
        # What is in its open segment stays.
        wait_for(lambda: one.counter("lost_segments") >= 2)
        assert len(one.held(keys(100))) < 60
        assert set(one.store.stats().failed_chunks) <= {"deleted", "unknown"}
        assert disk_usage(root) <= 16 * MIB


def test_hot_chunks_survive_another_process_that_only_stores(root: Path) -> None:
    with Engine(root, **SMALL) as reader, Engine(root, **SMALL) as writer:
        hot = keys(20)
        reader.put([*hot, *keys(20, 100)])  # the second segment, with room, is still open
        for start in range(1000, 3000, 20):
            reader.held(hot)
            writer.put(keys(20, start))
            time.sleep(0.02)
        wait_for(lambda: reader.counter("lost_segments"))
        assert len(reader.get(hot)) >= 15
        assert reader.store.stats().copied_chunks >= 15


@pytest.mark.parametrize("delay", ["slots.created=sleep:0.2", "slots.locked=sleep:0.2"])
def test_no_evictor_takes_a_segment_before_its_lock(root: Path, delay: str) -> None:
    with Engine(root, **SMALL) as victim, Engine(root, **SMALL) as evictor:
        for start in range(0, 900, 300):
            evictor.put(keys(300, start))
        done = threading.Event()

        def press() -> None:
            while not done.is_set():
                evictor._job += 1
                evictor.put(keys(60, random.randrange(10_000, 10**9)))

        thread = threading.Thread(target=press)
        thread.start()
        try:
            for n in range(3):
                faults.arm(delay)
                victim.put(keys(30, 5000 + 30 * n, "victim"))
                faults.arm("")
                mine = keys(30, 5000 + 30 * n, "victim")
                assert victim.get(mine) == mine
        finally:
            done.set()
            thread.join()


def test_open_segment_of_a_live_process_is_never_evicted(root: Path) -> None:
    with process("hold", root, "live", "auto") as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        with Engine(root, max_bytes=24 * MIB) as engine:
            for start in range(0, 5000, 500):
                engine.put(keys(500, start))
            assert engine.counter("evicted_segments") > 20
            assert len(engine.held(keys(20, salt="live"))) == 20
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "closed\n"


def test_a_forked_child_does_not_keep_a_dead_parents_locks(root: Path) -> None:
    """Parent stores, forks a child that stays, and dies; its segment must be adopted."""
    ready, hold = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:
        engine = Engine(root, **SMALL)
        engine.put(keys(20))
        if os.fork() == 0:
            os.write(ready[1], b"x")
            os.read(hold[0], 1)
            os._exit(0)
        os._exit(0)
    os.waitpid(parent, 0)
    os.read(ready[0], 1)
    try:
        with Engine(root, **SMALL) as engine:
            assert engine.counter("adopted_segments") == 1
            assert engine.get(keys(20)) == keys(20)
    finally:
        os.write(hold[1], b"x")


def test_private_segments_of_dead_processes_go_first(root: Path) -> None:
    dead, live = Namespace("d" * 32, {}, True), Namespace("a" * 32, {}, True)
    with Engine(root, **SMALL) as oldest:
        oldest.put(keys(60))
    with Engine(root, namespace=dead, **SMALL) as engine:
        engine.put(keys(150))  # more than both stores below evict before anyone looks
    with Engine(root, namespace=live, **SMALL) as alive:
        alive.put(keys(60))
        assert alive.get(keys(60)) == keys(60)
        with Engine(root, **SMALL) as engine:
            evictors = (engine, alive)  # either may be first
            while not sum(each.counter("evicted_segments") for each in evictors):
                engine.put(keys(30, engine.store.stats().stored_chunks + 5000))
            assert engine.held(keys(60)) == keys(60)  # the oldest, and still there
            wait_for(lambda: sum(each.counter("expired_bytes") for each in evictors))
    assert (root / "namespaces" / ("a" * 32 + ".json")).exists()
    with Engine(root, **SMALL):
        names_left = {path.stem[0] for path in (root / "namespaces").glob("*.json")}
        assert "0" in names_left


def test_namespace_after_a_switch_no_longer_protects_the_old_one(root: Path) -> None:
    first, second = Namespace("b" * 32, {}, True), Namespace("c" * 32, {}, True)
    with Engine(root, namespace=first, **SMALL) as engine:
        engine.put(keys(60))
        engine.store.switch_namespace(second)
        engine.put(keys(60, 100))
        while not engine.counter("evicted_segments"):
            engine.put(keys(30, engine.store.stats().stored_chunks + 5000))
        assert engine.counter("expired_bytes") > 0
        assert engine.get(keys(60, 100)) == keys(60, 100)


def test_locks_that_do_not_exclude_make_the_root_read_only(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(10))
    monkeypatch.setattr(locks, "try_lock", lambda fd, shared=False: True)
    with Engine(root, **SMALL) as engine:
        assert engine.get(keys(10)) == keys(10)
        engine.put(keys(10, 10))
        assert engine.store.stats().dropped_chunks == {"read_mode": 10}
    with Engine(root, exclusive=True, **SMALL) as engine:
        engine.put(keys(10, 10))
        assert engine.get(keys(20)) == keys(20)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_four_processes_and_a_deleter(root: Path, direct: str) -> None:
    """Same and different keys, files removed under them: right bytes, the bound, no errors."""
    children = [process("stress", root, f"s{n}", direct, SECONDS, 50) for n in range(4)]
    dice, end, highest = random.Random(7), time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        highest = max(highest, disk_usage(root))
        found = segments(root)
        if found and dice.random() < 0.1:
            dice.choice(found).unlink(missing_ok=True)
        time.sleep(0.01)
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 4, outputs
    for output in outputs:
        words = output.split()
        assert words[words.index("corrupt") + 1] == "0", output
        assert "damaged {}" in output, output
        assert int(words[words.index("loaded") + 1]) > 0, output
    assert highest <= 24 * MIB, highest


def test_bound_is_held_at_every_instant(root: Path) -> None:
    """Two stores fill one root as fast as they can; du is watched all the while."""
    with Engine(root, **SMALL) as one, Engine(root, **SMALL) as two:
        stop, highest = threading.Event(), [0]

        def watch() -> None:
            while not stop.is_set():
                highest[0] = max(highest[0], disk_usage(root))

        watcher = threading.Thread(target=watch)
        watcher.start()
        for start in range(0, 4000, 60):
            one.start_store(keys(60, start, "one"))
            two.start_store(keys(60, start, "two"))
            one.finish()
            two.finish()
        stop.set()
        watcher.join()
        assert one.counter("evicted_segments") + two.counter("evicted_segments") > 100
        assert 10 * MIB < highest[0] <= 16 * MIB
        wait_for(lambda: CHUNK * one.store.stats().chunks <= 16 * MIB)


def test_sequence_numbers_rise_over_processes_and_a_lost_lock_file(root: Path) -> None:
    seen: list[int] = []
    for n in range(4):
        with Engine(root, **SMALL) as engine:
            engine.put(keys(5, 10 * n))
        if n == 1:
            (root / "root.lock").unlink()
    for path in segments(root):
        page = path.read_bytes()[:4096]
        seen.append(fmt.unpack_page_block(page, fmt.SEGMENT_MAGIC).sequence)
    assert seen == sorted(set(seen))
    assert len(seen) == 4
