# SPDX-License-Identifier: Apache-2.0
"""No descriptor or memory left: a miss for now, and no fault of the chunk or its file."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from harness import KIB, MIB, Engine, keys, wait_for

from vllm_tiered_offload.store import reader
from vllm_tiered_offload.store.syscalls import EXHAUSTED, Syscalls

SMALL: dict[str, object] = {"max_bytes": 16 * MIB, "segment_bytes": 512 * KIB}


class Exhausted(Syscalls):
    """Opens of segments fail as often as told."""

    def __init__(self, flags: int, code: int = errno.EMFILE) -> None:
        self.flags, self.code, self.times, self.failed = flags, code, 0, 0

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        there = path.endswith(".seg") and not flags & os.O_CREAT
        if there and self.times and flags & os.O_ACCMODE == self.flags:
            self.times -= 1
            self.failed += 1
            raise OSError(self.code, os.strerror(self.code))
        return super().open(path, flags, mode)


def test_idle_descriptors_are_closed_before_a_load_fails(root: Path) -> None:
    calls = Exhausted(os.O_RDONLY)
    with Engine(root, syscalls=calls, refresh_interval=60.0, **SMALL) as engine:
        engine.put(keys(100))
        assert engine.get(keys(5)) == keys(5)
        descriptors = engine.store._disks[0].parts.descriptors
        assert len(descriptors._idle) == 1
        calls.times = 1
        last = keys(5, 95)
        assert engine.get(last) == last
        assert calls.failed == 1
        assert len(descriptors._idle) == 1
        assert engine.store.stats().failed_chunks == {}


@pytest.mark.parametrize("code", EXHAUSTED)
def test_a_chunk_that_could_not_be_opened_is_missed_and_comes_back(
    root: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "EXHAUSTED_SECONDS", 1.5)
    calls = Exhausted(os.O_RDONLY, code)
    with Engine(root, syscalls=calls, refresh_interval=60.0, **SMALL) as engine:
        engine.put(keys(20))
        calls.times = 1000
        assert engine.get(keys(20)) == []
        assert engine.store.stats().failed_chunks == {"exhausted": 20}
        wait_for(lambda: engine.held(keys(20)) == [], 1.0)  # not asked for again at once
        calls.times = 0
        wait_for(lambda: engine.held(keys(20)) == keys(20))
        assert engine.get(keys(20)) == keys(20)


def test_memory_that_a_read_wants_is_no_fault_of_the_chunk(root: Path) -> None:
    class NoMemory(Syscalls):
        armed = False

        def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            if self.armed:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return super().preadv(fd, buffers, offset)

    calls = NoMemory()
    with Engine(root, syscalls=calls, refresh_interval=60.0, **SMALL) as engine:
        engine.put(keys(20))
        calls.armed = True
        assert engine.get(keys(20)) == []
        calls.armed = False
        wait_for(lambda: engine.held(keys(20)) == keys(20))
        assert engine.get(keys(20)) == keys(20)


def test_a_victim_that_cannot_be_opened_for_now_is_not_given_up(root: Path) -> None:
    calls = Exhausted(os.O_RDWR)
    with Engine(root, syscalls=calls, **SMALL) as engine:
        engine.put(keys(300))
        calls.times = 20
        start = 1000
        while calls.times:
            engine.put(keys(60, start))
            start += 60
            time.sleep(0.01)
        assert engine.counter("undeletable_segments") == 0
        before = engine.counter("evicted_segments")
        wait_for(lambda: engine.store.stats().roots[0].paused is None or _store(engine))
        engine.put(keys(600, 10_000))
        wait_for(lambda: engine.counter("evicted_segments") > before)


def _store(engine: Engine) -> bool:
    """A store, which ends the pause if it is over."""
    engine.put(keys(1, 50_000 + engine._job))
    return engine.store.stats().roots[0].paused is None


def test_following_others_goes_on_as_soon_as_there_are_descriptors(root: Path) -> None:
    """Unlike a bad sector: there is nothing to be gained by waiting."""
    calls = Exhausted(os.O_RDONLY)
    with (
        Engine(root, **SMALL) as writer,
        Engine(root, syscalls=calls, clock=lambda: 100.0, **SMALL) as reader,
    ):
        calls.times = 1000
        writer.put(keys(20))
        wait_for(lambda: calls.failed > 3)
        calls.times = 0
        wait_for(lambda: reader.held(keys(20)) == keys(20))
        assert reader.get(keys(20)) == keys(20)
        assert reader.counter("damaged.unreadable") == 0
