# SPDX-License-Identifier: Apache-2.0
"""Two threads at one segment: each interleaving that once went wrong, made to happen."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from harness import MIB, Engine, keys, segments, wait_for

from vllm_tiered_offload.store.recovery import SegmentReader

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
