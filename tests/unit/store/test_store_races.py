# SPDX-License-Identifier: Apache-2.0
"""Two threads at one segment: each interleaving that once went wrong, made to happen."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from harness import KIB, MIB, Engine, keys, segments, wait_for

from vllm_tiered_offload.store.recovery import SegmentReader
from vllm_tiered_offload.store.syscalls import Syscalls

SMALL: dict[str, object] = {"max_bytes": 16 * MIB, "segment_bytes": 512 * KIB}


def refreshes(engine: Engine) -> int:
    return engine.store._disks[0]._refresher._refreshes


@pytest.mark.parametrize("late", ["writer", "refresher"])
def test_a_refresh_does_not_take_a_segment_in_the_making_for_anothers(
    root: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The file is there before the writer has entered it into the catalogue."""
    seen, proceed, armed = threading.Event(), threading.Event(), [False]
    identify = SegmentReader.identify

    def slow_look(self, fd):  # type: ignore[no-untyped-def]
        found = identify(self, fd)
        if armed[0] and "refresh" in threading.current_thread().name and found[1] is not None:
            armed[0] = False
            seen.set()
            if late == "refresher":
                proceed.wait()
        return found

    monkeypatch.setattr(SegmentReader, "identify", slow_look)
    with Engine(root, **SMALL) as engine:
        slots = engine.store._disks[0].parts.slots
        create = slots.create

        def slow_creation(*args):  # type: ignore[no-untyped-def]
            armed[0] = True
            made = create(*args)
            assert seen.wait(5)
            if late == "writer":
                before = refreshes(engine)
                wait_for(lambda: refreshes(engine) > before + 1)
            return made

        monkeypatch.setattr(slots, "create", slow_creation)
        engine.put(keys(10))
        proceed.set()
        before = refreshes(engine)
        wait_for(lambda: refreshes(engine) > before + 1)
        engine.put(keys(10, 10))
        assert engine.get(keys(20)) == keys(20)
        assert engine.counter("lost_segments") == 0
        assert len(segments(root)) == 1
        assert engine.store.stats().roots[0].used_slots == 1
        assert engine.store._disks[0].parts.others_store_until < 0  # nobody else is there


def test_what_is_written_to_a_file_removed_meanwhile_is_a_miss_and_can_be_stored_again(
    root: Path,
) -> None:
    """The segment is forgotten before its chunks are entered: they must not be found in it."""

    class Removed(Syscalls):
        armed = False

        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            done = super().pwritev(fd, buffers, offset)
            if self.armed and len(buffers) > 1:
                self.armed = False
                os.unlink(segments(root)[0])
                wait_for(lambda: engine.counter("lost_segments") == 1)
            return done

    calls = Removed()
    with Engine(root, syscalls=calls, **SMALL) as engine:
        engine.put(keys(5))
        calls.armed = True
        engine.put(keys(10, 10))
        assert engine.held(keys(20)) == []
        assert engine.store.stats().chunks == 0
        engine.put(keys(20))
        assert engine.held(keys(20)) == keys(20)
        assert engine.get(keys(20)) == keys(20)
