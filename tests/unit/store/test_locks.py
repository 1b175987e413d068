# SPDX-License-Identifier: Apache-2.0
"""Locks that a fork must not leak, and a root.lock that somebody deletes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import KIB, MIB, Engine, keys, segments

from vllm_tiered_offload.store import Namespace, StoreError, locks, namespaces
from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.syscalls import Syscalls

SMALL: dict[str, object] = {"max_bytes": 16 * MIB, "segment_bytes": 512 * KIB}


def child_has(name: str) -> bool:
    """Forks: whether a descriptor of a file of this name is open in the child."""
    child = os.fork()
    if child == 0:
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found |= name in os.readlink(f"/proc/self/fd/{fd}")
        os._exit(found)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


class SlowOpen(Syscalls):
    """Opens at once and returns late."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.opened = threading.Event()

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        self.opened.set()
        time.sleep(self.seconds)
        return fd


def test_no_fork_comes_between_a_lock_file_and_its_entry(tmp_path: Path) -> None:
    calls = SlowOpen(0.3)
    lock = locks.RootLock(str(tmp_path / "root.lock"), calls)
    done = threading.Event()

    def hold() -> None:
        with lock.hold():
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert calls.opened.wait(5)
        assert not child_has("root.lock")
    finally:
        done.set()
        thread.join()


def test_no_fork_comes_between_a_segment_and_its_entry(root: Path) -> None:
    class SlowSegments(SlowOpen):
        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            if flags & os.O_CREAT and path.endswith(".seg"):
                return super().open(path, flags, mode)
            return Syscalls.open(self, path, flags, mode)

    calls = SlowSegments(0.3)
    with Engine(root, syscalls=calls, **SMALL) as engine:
        engine.start_store(keys(3))
        assert calls.opened.wait(5)
        assert not child_has(".seg")
        engine.finish()


def test_an_open_that_hangs_does_not_keep_the_process_from_forking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_FORK_WAIT", 0.05)
    hangs, free = threading.Event(), threading.Event()

    def hung_open() -> int:
        hangs.set()
        free.wait()
        return os.open(tmp_path / "late", os.O_RDWR | os.O_CREAT)

    opened: list[int] = []
    thread = threading.Thread(target=lambda: opened.append(locks.open_kept(hung_open)))
    thread.start()
    assert hangs.wait(5)
    assert not child_has("late")
    free.set()
    thread.join()
    assert not child_has("late")
    locks.close(opened[0])


def test_who_asks_for_an_owner_leaves_no_lock_to_a_child(root: Path) -> None:
    """Else the namespace had an owner for as long as the child lives."""
    own = Namespace("e" * 32, {}, True)
    with Engine(root, **SMALL) as engine:
        there = engine.store._disks[0].parts.root
        fd = namespaces.enter(there, own)
        assert fd is not None
        locks.close(fd)
        try_lock: Callable[..., bool] = locks.try_lock
        ready, stay = os.pipe(), os.pipe()

        def fork_while_asking(fd: int, **ways: bool) -> bool:
            got = try_lock(fd, **ways)
            if os.fork() == 0:
                os.write(ready[1], b"x")
                os.read(stay[0], 1)
                os._exit(0)
            return got

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks, "try_lock", fork_while_asking)
            assert not namespaces.is_alive(there, own.fingerprint)
        os.read(ready[0], 1)
        try:
            assert not namespaces.is_alive(there, own.fingerprint)
        finally:
            os.write(stay[1], b"x")
            os.wait()


def test_a_lock_file_deleted_while_it_is_held_excludes_again(tmp_path: Path) -> None:
    """One waits for the file that is gone, another has the new one: only one may be inside."""

    class Watched(Syscalls):
        opened = threading.Event()

        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            fd = super().open(path, flags, mode)
            self.opened.set()
            return fd

    path = tmp_path / "root.lock"
    first, third = (locks.RootLock(str(path), Syscalls()) for _ in range(2))
    second, inside = locks.RootLock(str(path), Watched()), threading.Event()

    def wait_for_lock() -> None:
        with second.hold():
            inside.set()

    waiter = threading.Thread(target=wait_for_lock)
    with contextlib.ExitStack() as old, contextlib.ExitStack() as new:
        old.enter_context(first.hold())
        waiter.start()
        assert Watched.opened.wait(5)
        path.unlink()
        new.enter_context(third.hold())
        old.close()
        assert not inside.wait(0.3)
        new.close()
        assert inside.wait(5)
    waiter.join()


def test_a_lock_file_that_changes_for_ever_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "same_file", lambda fd, path: False)
    lock = locks.RootLock(str(tmp_path / "root.lock"), Syscalls())
    with pytest.raises(StoreError, match="another file"), lock.hold(timeout=0.1):
        pass
    assert not [fd for fd in locks._held if str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}")]


def test_numbers_rise_though_the_lock_file_is_lost_while_processes_run(root: Path) -> None:
    """One that has not seen the others' newest segments must not give their numbers again."""
    with (
        Engine(root, **SMALL) as busy,
        Engine(root, refresh_interval=60.0, **SMALL) as idle,
    ):
        busy.put(keys(300))
        (root / "root.lock").unlink()
        idle.put(keys(3, 1000))
        busy.put(keys(60, 2000))
        seen = []
        for path in segments(root):
            page = path.read_bytes()[:4096]
            seen.append(fmt.unpack_page_block(page, fmt.SEGMENT_MAGIC).sequence)
        assert len(seen) == len(set(seen)) > 10


def test_forks_and_locks_get_along(tmp_path: Path) -> None:
    """Any number of both: no child has a lock file, nobody waits for nobody."""
    stop = threading.Event()

    def hold_again_and_again(name: str) -> None:
        lock = locks.RootLock(str(tmp_path / name), Syscalls())
        while not stop.is_set():
            with lock.hold():
                pass

    threads = [
        threading.Thread(target=hold_again_and_again, args=[name])
        for name in ("one.lock", "one.lock", "two.lock")
    ]
    for thread in threads:
        thread.start()
    try:
        assert not any(child_has(".lock") for _ in range(50))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
