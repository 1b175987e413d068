# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any moment: what is found afterwards is right, and nothing else is lost."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import KIB, MIB, Engine, disk_usage, keys, process, segments, wait_for

from vllm_tiered_offload.store.syscalls import Syscalls

KILLS = int(os.environ.get("VTO_KILLS", "16"))
MOST_NUMBER = 4000
POINTS = [
    "slots.created",
    "slots.locked",
    "slots.header_written",
    "segment.before_write",
    "segment.after_write",
    "segment.after_mark",
    "segment.before_seal",
    "segment.before_trailer",
    "segment.after_seal",
    "reclaimer.victim_chosen",
    "reclaimer.before_copy",
    "reclaimer.after_copy",
    "slots.before_truncate",
    "slots.before_unlink",
]
LIMITS: dict[str, object] = {"max_bytes": 24 * MIB, "segment_bytes": 512 * KIB}


@contextlib.contextmanager
def place(kind: str) -> Iterator[Path]:
    """A directory on disk, or on tmpfs, where torn writes are common."""
    parent = "/dev/shm" if kind == "tmpfs" else None
    with tempfile.TemporaryDirectory(prefix="vto-test-", dir=parent) as path:
        yield Path(path) / "root"


def check(root: Path, salts: list[str], direct: str) -> int:
    """Loads every chunk that is found; the harness compares every byte. Returns how many."""
    with Engine(root, direct_io=direct, mode="read") as engine:
        held = [key for salt in salts for key in engine.held(keys(MOST_NUMBER, salt=salt))]
        arrived = engine.get(held)
        failed = engine.store.stats().failed_chunks
        assert arrived == held, failed
    return len(held)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "direct"), [("disk", "auto"), ("tmpfs", "off")])
def test_killed_at_random(kind: str, direct: str) -> None:
    dice = random.Random(1)
    found = 0
    with place(kind) as root:
        for kill in range(KILLS):
            child = process("store", root, f"s{kill % 7}", direct)
            with child:
                assert child.stdout is not None
                for _ in range(dice.randrange(2, 60)):
                    child.stdout.readline()
                with contextlib.suppress(Exception):
                    child.wait(dice.random() * 0.02)
                child.kill()
            assert disk_usage(root) <= 24 * MIB
            found += check(root, [f"s{n}" for n in range(7)], direct)
    assert found > 10 * KILLS


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("kind", "direct"), [("disk", "auto"), ("tmpfs", "off")])
def test_killed_at_a_named_point(point: str, kind: str, direct: str) -> None:
    with place(kind) as root:
        with process("store", root, "first", direct, faults=f"{point}=kill:3") as child:
            assert child.stdout is not None
            lines = child.stdout.read().splitlines()
        assert child.returncode == -9, f"{point} was never passed: {lines[-3:]}"
        assert check(root, ["first"], direct) >= 8
        with Engine(root, direct_io=direct, **LIMITS) as engine:  # goes on as if nothing was
            engine.put(keys(100, salt="second"))
            assert engine.get(keys(100, salt="second")) == keys(100, salt="second")
        assert disk_usage(root) <= 24 * MIB


def test_torn_write_above_the_mark_is_left_out(root: Path) -> None:
    """A valid table with stale payload behind it: what a crash in one pwritev leaves."""

    class TornCalls(Syscalls):
        armed = False

        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            if self.armed and len(buffers) > 2:
                os.pwritev(fd, buffers[: len(buffers) // 2], offset)
                os._exit(9)
            return super().pwritev(fd, buffers, offset)

    first, torn = keys(10), keys(20, 100)
    child = os.fork()
    if child == 0:
        calls = TornCalls()
        engine = Engine(root, syscalls=calls, refresh_interval=60.0)
        engine.put(first)
        calls.armed = True
        engine.put(torn)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with Engine(root) as engine:
        held = engine.held([*first, *torn])
        assert held == [*first, *torn[:9]]  # the table and nine payloads were written
        assert engine.get(held) == held
        assert engine.counter("adopted_segments") == 1


def test_leftovers_are_removed_and_counted(root: Path) -> None:
    with Engine(root) as engine:
        engine.put(keys(10))
    (root / "segments" / "000007.seg").write_bytes(b"")
    (root / "segments" / "000008.seg").write_bytes(bytes(MIB))
    with Engine(root) as engine:
        assert engine.counter("removed_leftovers") == 2
        assert engine.get(keys(10)) == keys(10)
    assert len(segments(root)) == 1


def test_a_live_process_loses_nothing_to_a_restart(root: Path) -> None:
    with process("hold", root, "live", "auto") as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        for _ in range(3):
            with Engine(root, **LIMITS) as engine:
                engine.put(keys(20, salt="other"))
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "closed\n"
    with Engine(root, **LIMITS) as engine:
        assert engine.get(keys(20, salt="live")) == keys(20, salt="live")


def test_adopted_segments_are_found_without_being_changed(root: Path) -> None:
    with process("hold", root, "dead", "auto") as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.kill()
    (segment,) = segments(root)
    before = segment.read_bytes()
    for _ in range(2):
        with Engine(root, **LIMITS) as engine:
            wait_for(lambda: engine.held(keys(20, salt="dead")) == keys(20, salt="dead"))
            assert engine.get(keys(20, salt="dead")) == keys(20, salt="dead")
    assert segment.read_bytes() == before
