# SPDX-License-Identifier: Apache-2.0
"""Bounds and full disks: evict, or pause and say so; loads go on; stores resume."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
from harness import KIB, MIB, Engine, disk_usage, keys, segments, wait_for

from vllm_tiered_offload.store import StoreError, watch
from vllm_tiered_offload.store.slots import NoRoomError
from vllm_tiered_offload.store.syscalls import Syscalls

SMALL: dict[str, object] = {"max_bytes": 16 * MIB, "segment_bytes": 512 * KIB}


class Full(Syscalls):
    """A file system that fails where and as long as it is told to."""

    def __init__(self, where: str, code: int) -> None:
        self.where, self.code, self.on = where, code, False

    def _fail(self, where: str) -> None:
        if self.on and where == self.where:
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path, flags, mode=0o600):  # type: ignore[no-untyped-def]
        if flags & os.O_CREAT and path.endswith(".seg"):
            self._fail("inode")
        return super().open(path, flags, mode)

    def fallocate(self, fd, length):  # type: ignore[no-untyped-def]
        self._fail("allocate")
        super().fallocate(fd, length)

    def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        if len(buffers) > 1:
            self._fail("write")
        return super().pwritev(fd, buffers, offset)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(watch, "LONGEST_PAUSE", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("where", ["inode", "allocate", "write"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_pauses_stores_once_and_resumes(
    root: Path, where: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.tiered_offload.store")
    calls = Full(where, code)
    with Engine(root, syscalls=calls, **SMALL) as engine:
        engine.put(keys(100))
        calls.on = True
        for n in range(6):
            (done,) = engine.put(keys(40, 200 + 40 * n))
            assert done.ok  # left out on purpose, and counted
        stats = engine.store.stats()
        assert errno.errorcode[code] in (stats.roots[0].paused or "")
        assert set(stats.dropped_chunks) <= {"full", "paused"}
        assert sum(stats.dropped_chunks.values()) > 40
        held = engine.held(keys(100))
        assert engine.get(held) == held  # loads go on
        calls.on = False

        def resumed() -> bool:
            engine.put(keys(20, 1000))
            return engine.held(keys(20, 1000)) == keys(20, 1000)

        wait_for(resumed)
        wait_for(lambda: engine.store.stats().roots[0].paused is None)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("stores are paused" in line for line in lines) == 1
    assert sum("stores resume" in line for line in lines) == 1


@pytest.mark.usefixtures("impatient")
def test_no_space_is_helped_by_evicting_one_segment(root: Path) -> None:
    """The disk is smaller than max_bytes: eviction keeps the store going."""

    class SmallDisk(Syscalls):
        def fallocate(self, fd, length):  # type: ignore[no-untyped-def]
            if sum(path.stat().st_size for path in segments(root)) + length > 4 * MIB:
                raise OSError(errno.ENOSPC, "small")
            super().fallocate(fd, length)

    with Engine(root, syscalls=SmallDisk(), **SMALL) as engine:
        for start in range(0, 1200, 60):
            engine.put(keys(60, start))
        assert engine.store.stats().dropped_chunks == {}
        assert engine.counter("evicted_segments") > 20
        recent = keys(60, 1140)
        assert engine.get(recent) == recent


@pytest.mark.usefixtures("impatient")
def test_nothing_evictable_and_no_slot_left(root: Path) -> None:
    """All other slots belong to segments that will not go."""

    class Stubborn(Syscalls):
        def open(self, path, flags, mode=0o600):  # type: ignore[no-untyped-def]
            if (
                path.endswith(".seg")
                and flags & os.O_ACCMODE == os.O_RDWR
                and os.path.exists(path)
            ):
                raise OSError(errno.EPERM, "immutable")
            return super().open(path, flags, mode)

    with Engine(root, syscalls=Stubborn(), **SMALL) as engine:
        for start in range(0, 1200, 60):
            engine.put(keys(60, start))
        (stats,) = engine.store.stats().roots
        assert stats.paused == "all slots are in use"
        tried = stats.counters["undeletable_segments"]
        assert tried <= stats.slots
        engine.put(keys(60, 5000))
        assert engine.counter("undeletable_segments") == tried  # not again and again
        held = engine.held(keys(1200))
        assert len(held) > 500
        assert engine.get(held) == held


def test_min_free_bytes_keeps_room_for_others(root: Path) -> None:
    class Filling(Syscalls):
        free = 1 << 40

        def free_bytes(self, path):  # type: ignore[no-untyped-def]
            return self.free

    calls = Filling()
    settings = {**SMALL, "min_free_bytes": 10 * MIB}
    with Engine(root, syscalls=calls, **settings) as engine:
        engine.put(keys(300))
        before = len(segments(root))
        calls.free = 10 * MIB + 200 * KIB  # others need it: we give way
        wait_for(lambda: len(segments(root)) < before)
        calls.free = 1 << 40
        engine.put(keys(60, 1000))
        assert engine.get(keys(60, 1000)) == keys(60, 1000)


def test_without_a_bound_a_tenth_of_the_file_system_stays_free(root: Path) -> None:
    with Engine(root, max_bytes=None, segment_bytes=MIB) as engine:
        total = Syscalls().total_bytes(str(root))
        (facts,) = engine.store.describe()["roots"]  # type: ignore[misc]
        assert facts["min_free_bytes"] == total // 10
        assert facts["max_bytes"] is None


def test_a_smaller_bound_trims_before_serving(root: Path) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(600))
    assert disk_usage(root) > 8 * MIB
    settings = {**SMALL, "max_bytes": 6 * MIB}
    with Engine(root, **settings) as engine:
        assert disk_usage(root) <= 6 * MIB
        held = engine.held(keys(600))
        assert 100 < len(held) < 400
        assert engine.get(held) == held
        engine.put(keys(600, 1000))
        assert disk_usage(root) <= 6 * MIB


def test_a_running_store_follows_a_bound_made_smaller_by_another(root: Path) -> None:
    with Engine(root, **SMALL) as running:
        running.put(keys(600))
        with Engine(root, **{**SMALL, "max_bytes": 6 * MIB}):
            pass
        wait_for(lambda: running.store.stats().roots[0].max_bytes == 6 * MIB)
        running.put(keys(300, 1000))
        wait_for(lambda: disk_usage(root) <= 6 * MIB)


def test_foreign_files_take_from_the_bound(root: Path) -> None:
    root.mkdir()
    (root / "notes").write_bytes(os.urandom(8 * MIB))
    with Engine(root, **SMALL) as engine:
        for start in range(0, 900, 60):
            engine.put(keys(60, start))
            assert disk_usage(root) <= 16 * MIB
    assert (root / "notes").stat().st_size == 8 * MIB


def test_a_slot_that_the_listing_does_not_show_is_passed_over(root: Path) -> None:
    """A network file system may list yesterday's directory; O_EXCL knows better."""
    with Engine(root, **SMALL) as engine:
        engine.put(keys(60))
        before = {path: path.read_bytes() for path in segments(root)}
        slots = engine.store._disks[0].parts.slots
        listed = slots.list
        slots.list = dict  # type: ignore[method-assign]
        engine.put(keys(60, 100))
        slots.list = listed  # type: ignore[method-assign]
        assert engine.held(keys(60, 100)) == keys(60, 100)
        assert engine.get(keys(60, 100)) == keys(60, 100)
        for path, data in before.items():
            assert path.read_bytes()[:4096] == data[:4096]


def test_several_writers_on_one_root(root: Path) -> None:
    with Engine(root, write_threads=3, io_bytes=64 * KIB, **SMALL) as engine:
        for start in range(0, 3000, 60):
            engine.put(keys(60, start))
            assert disk_usage(root) <= 16 * MIB
        held = engine.held(keys(3000))
        assert len(held) > 300
        assert engine.serves_all_it_holds(keys(3000))
        assert engine.store.stats().dropped_chunks == {}
    with Engine(root, write_threads=3, **SMALL) as engine:
        assert engine.get(engine.held(keys(3000)))


def test_one_failing_disk_degrades_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneDies(Syscalls):
        dead = False

        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            self._check(fd)
            return super().pwritev(fd, buffers, offset)

        def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            self._check(fd)
            return super().preadv(fd, buffers, offset)

        def _check(self, fd: int) -> None:
            if self.dead and "/bad/" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    calls = OneDies()
    good, bad = tmp_path / "good", tmp_path / "bad"
    with Engine(good, bad, syscalls=calls, io_bytes=64 * KIB) as engine:
        engine.put(keys(100))
        calls.dead = True
        arrived = engine.get(keys(100))
        assert 20 < len(arrived) < 80
        assert engine.store.stats().failed_chunks["io_error"] > 20
        for start in range(1000, 1200, 20):
            engine.put(keys(20, start))
        fresh = engine.held(keys(200, 1000))
        assert len(fresh) > 100
        assert engine.get(fresh) == fresh
        by_path = {Path(stats.path).name: stats for stats in engine.store.stats().roots}
        assert not by_path["bad"].healthy
        assert by_path["good"].healthy


def test_a_root_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Engine(root, **SMALL) as engine:
        engine.put(keys(60))
        root.rename(tmp_path / "gone")
        wait_for(lambda: not engine.held(keys(60)))
        engine.put(keys(10, 100))
        assert not (root / "segments").exists()
        assert engine.held(keys(10, 100)) in ([], keys(10, 100))


def test_segments_made_too_small_by_another_process_stop_stores_not_the_root(
    root: Path,
) -> None:
    """The geometry of an empty root is settled anew by whoever comes next."""
    large = {"chunk_bytes": MIB, "max_bytes": 64 * MIB, "segment_bytes": 4 * MIB, "rows": 4}
    with Engine(root, **large) as first:  # type: ignore[arg-type]
        with Engine(root, **SMALL) as second:
            second.put(keys(60))
            there = first.store._disks[0].parts.root
            wait_for(lambda: there.geometry.segment_bytes == 512 * KIB)
            (done,) = first.put(keys(1, 500))
            assert not done.ok
            assert "cannot hold" in (done.error or "")
            assert second.get(keys(60)) == keys(60)
        assert first.counter("evicted_segments") == 0


def test_no_slot_is_taken_while_there_are_more_than_the_bound_allows(root: Path) -> None:
    """max_bytes was made smaller by another process, and nothing has been trimmed yet."""
    with Engine(root, **SMALL) as engine:
        engine.put(keys(300))
        parts = engine.store._disks[0].parts
        used = sorted(parts.slots.list())
        os.unlink(parts.root.slot_path(used[0]))
        parts.root.foreign_bytes = 10 * MIB  # what is left is more than fits now
        assert 0 < parts.root.slots < len(used) - 1
        with pytest.raises(NoRoomError):
            parts.slots.create(parts.namespace, parts.chunk_bytes)


def test_a_segment_of_more_chunks_than_a_place_can_number_is_refused(root: Path) -> None:
    huge = {"chunk_bytes": 4 * KIB, "segment_bytes": 128 << 30, "max_bytes": 1 << 40}
    with pytest.raises(StoreError, match="segment_bytes"):
        Engine(root, **huge)  # type: ignore[arg-type]
