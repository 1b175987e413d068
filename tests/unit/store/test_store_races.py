# SPDX-License-Identifier: Apache-2.0
"""Two threads at one segment: each interleaving that once went wrong, made to happen."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest
from harness import KIB, MIB, Engine, keys, segments, wait_for

from vllm_tiered_offload.store import Namespace, locks, namespaces
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


def test_a_private_namespace_entered_while_somebody_asks_for_its_owner_is_alive(
    root: Path,
) -> None:
    """Asking takes the lock for a moment; the owner must have it all the same."""
    own = Namespace("e" * 32, {}, True)
    with Engine(root, **SMALL) as other:
        there = other.store._disks[0].parts.root
        fd = namespaces.enter(there, own)  # so that there is a manifest
        assert fd is not None
        locks.close(fd)
        asker = os.open(namespaces.manifest_path(there, own.fingerprint), os.O_RDWR)
        assert locks.try_lock(asker)
        timer = threading.Timer(0.1, os.close, [asker])
        timer.start()
        with Engine(root, namespace=own, **SMALL):
            timer.join()
            assert namespaces.is_alive(there, own.fingerprint)
        assert not namespaces.is_alive(there, own.fingerprint)


def test_two_that_ask_for_one_owner_are_no_owner(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both evictors of a full root want to know at once whether a namespace is dead."""
    both, try_lock = threading.Barrier(2), locks.try_lock

    def slow_try(fd: int, *, shared: bool = False) -> bool:
        got = try_lock(fd, shared=shared)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("d.json"):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
        return got

    dead = Namespace("d" * 32, {}, True)
    with Engine(root, **SMALL) as oldest:
        oldest.put(keys(20))
    with Engine(root, namespace=dead, **SMALL) as engine:
        engine.put(keys(60))
    with Engine(root, **SMALL) as one, Engine(root, **SMALL) as two:
        monkeypatch.setattr(locks, "try_lock", slow_try)
        answers: list[set[str]] = []

        def ask(engine: Engine) -> None:
            victims = engine.store._disks[0]._reclaimer._candidates()
            answers.append({segment.header.fingerprint for segment in victims[:1]})

        askers = [threading.Thread(target=ask, args=[each]) for each in (one, two)]
        one.put(keys(60, 100))
        wait_for(lambda: two.store.stats().roots[0].used_slots == 5)
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert answers == [{dead.fingerprint}] * 2
        monkeypatch.undo()


def test_a_manifest_that_cannot_be_opened_is_no_dead_owner(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Namespace("e" * 32, {}, True)
    with Engine(root, namespace=own, **SMALL) as engine:
        there = engine.store._disks[0].parts.root

        def no_descriptor(*_: object, **__: object) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", no_descriptor)
            assert namespaces.is_alive(there, own.fingerprint)


def test_a_refresh_does_not_bring_back_what_is_being_evicted(root: Path) -> None:
    """Between forgetting a segment and truncating its file the file looks like a new one."""

    class Slow(Syscalls):
        def ftruncate(self, fd, length):  # type: ignore[no-untyped-def]
            if length == 0 and not found:
                seen = refreshes(engine)
                wait_for(lambda: refreshes(engine) > seen + 2)
                found.append(engine.store.stats().chunks)
                found.append(len(set(engine.held(keys(31)))))
            super().ftruncate(fd, length)

    found: list[int] = []
    with Engine(root, syscalls=Slow(), **SMALL) as engine:
        start = 0
        while not engine.counter("evicted_segments"):
            engine.put(keys(31, start))
            start += 31
        wait_for(lambda: found)
        assert found[1] == 0
        assert engine.counter("lost_segments") == 0
        assert engine.store._disks[0].parts.others_store_until < 0


def test_a_file_that_will_not_shrink_is_tried_once(root: Path) -> None:
    class Stubborn(Syscalls):
        tried = 0

        def ftruncate(self, fd, length):  # type: ignore[no-untyped-def]
            if length == 0 and os.readlink(f"/proc/self/fd/{fd}").endswith("0.seg"):
                self.tried += 1
                raise OSError(errno.ETXTBSY, os.strerror(errno.ETXTBSY))
            super().ftruncate(fd, length)

    calls = Stubborn()
    with Engine(root, syscalls=calls, **SMALL) as engine:
        for start in range(0, 3000, 60):
            engine.put(keys(60, start))
        seen = refreshes(engine)
        wait_for(lambda: refreshes(engine) > seen + 3)
        engine.put(keys(600, 5000))
        assert calls.tried == engine.counter("undeletable_segments") == 3  # slots 0, 10 and 20
        assert engine.store.stats().dropped_chunks == {}


def test_threads_exclude_each_other_where_locks_do_not(tmp_path: Path) -> None:
    """The operator vouches for other processes, not for the threads of this one."""
    lock = locks.RootLock(str(tmp_path / "root.lock"), Syscalls(), works=False)
    inside: list[int] = []

    def enter() -> None:
        with lock.hold():
            inside.append(len(inside))

    with lock.hold():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.1)
        assert not inside
    thread.join()
    assert inside


def test_a_descriptor_that_a_fork_closed_is_not_closed_again(tmp_path: Path) -> None:
    """Its number may be another file's by then."""
    fd = locks.open_kept(lambda: os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT))
    os.close(fd)  # as the hook of a forked child does, which forgets it, too
    locks._held.discard(fd)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == fd
    locks.close(fd)
    os.close(other)  # EBADF if it was taken for ours
