# SPDX-License-Identifier: Apache-2.0
"""Slow and hung disks: lookups miss and come back, jobs end once, shutdown is bounded."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import CHUNK, KIB, MIB, Engine, keys, wait_for

from vllm_tiered_offload.store import faults
from vllm_tiered_offload.store.syscalls import Syscalls


class Gate(Syscalls):
    """Reads or writes of payloads hang until the gate opens."""

    def __init__(self) -> None:
        self.reads, self.writes = threading.Event(), threading.Event()
        self.open_all()

    def open_all(self) -> None:
        self.reads.set()
        self.writes.set()

    def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        if len(buffers[0]) == CHUNK:
            self.reads.wait()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        if len(buffers) > 1:
            self.writes.wait()
        return super().pwritev(fd, buffers, offset)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open_all()


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_lookups_miss_while_a_call_hangs_and_hit_again(
    root: Path, gate: Gate, what: str
) -> None:
    with Engine(root, syscalls=gate, stall_timeout=0.2) as engine:
        engine.put(keys(20))
        getattr(gate, what).clear()
        if what == "reads":
            job = engine.start_load(keys(20))
        else:
            job = engine.start_store(keys(20, 100))
        wait_for(lambda: engine.store.stats().stalled)
        assert engine.held(keys(20)) == []
        assert engine.store.take_completions() == []  # the kernel may still use the rows
        assert engine.store.pending_jobs == 1
        engine.store.submit_store(99, keys(1, 500), [40])
        assert engine.store.stats().dropped_chunks == {"stalled": 1}
        gate.open_all()
        assert {done.job_id for done in engine.finish()} == {job, 99}
        wait_for(lambda: engine.held(keys(20)) == keys(20))
        assert engine.get(keys(20)) == keys(20)


def test_only_the_hung_disk_misses(tmp_path: Path) -> None:
    class OneHangs(Gate):
        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            import os

            if len(buffers) > 1 and "/slow/" in os.readlink(f"/proc/self/fd/{fd}"):
                self.writes.wait()
            return Syscalls.pwritev(self, fd, buffers, offset)

    gate = OneHangs()
    roots = (tmp_path / "slow", tmp_path / "quick")
    with Engine(*roots, syscalls=gate, stall_timeout=0.2, io_bytes=64 * KIB) as engine:
        engine.put(keys(40))
        gate.writes.clear()
        engine.start_store(keys(20, 100))
        wait_for(lambda: engine.store.stats().stalled)
        held = engine.held(keys(40))
        assert 10 < len(held) < 30
        gate.open_all()
        engine.finish()
        assert engine.get(held) == held


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_shutdown_is_bounded_and_a_hung_job_is_not_reported(
    root: Path, gate: Gate, what: str
) -> None:
    engine = Engine(root, syscalls=gate, read_threads=1)
    engine.put(keys(40))
    getattr(gate, what).clear()
    start = engine.start_load if what == "reads" else engine.start_store
    begun = start(keys(20) if what == "reads" else keys(20, 100))
    wait_for(lambda: engine.store.stats().roots[0].oldest_seconds > 0)
    waiting = start(keys(20, 20) if what == "reads" else keys(20, 200))
    began = time.monotonic()
    assert not engine.store.shutdown(timeout=0.5)
    assert time.monotonic() - began < 5
    (done,) = engine.store.take_completions()
    assert done.job_id == waiting
    assert not done.ok
    assert engine.store.pending_jobs == 1
    gate.open_all()
    wait_for(lambda: engine.store.pending_jobs == 0)
    (done,) = engine.store.take_completions()
    assert done.job_id == begun
    assert engine.store.shutdown()


def test_loads_go_before_waiting_stores(root: Path) -> None:
    with Engine(root, rows=100, io_bytes=4 * CHUNK, read_threads=1) as engine:
        engine.put(keys(8))
        faults.arm("segment.before_write=sleep:0.02,reader.before_read=sleep:0.02")
        engine.start_store(keys(80, 100), 8)  # 20 writes
        engine.store.submit_load(1000, keys(8), list(range(8)))
        wait_for(lambda: engine.store.pending_jobs == 1)
        (first,) = engine.store.take_completions()
        assert first.is_load
        engine.store.drain()


def test_shutdown_finishes_what_is_queued(root: Path) -> None:
    engine = Engine(root, io_bytes=4 * CHUNK)
    faults.arm("segment.before_write=sleep:0.01")
    engine.start_store(keys(60))
    assert engine.store.shutdown()
    (done,) = engine.store.take_completions()
    assert done.bytes == 60 * CHUNK
    with Engine(root) as engine:
        assert engine.get(keys(60)) == keys(60)


def unmount(mount: Path, tries: int = 50) -> None:
    """As soon as nobody uses it: a process that is being forked elsewhere, or a scanner, may
    hold a file for a moment. In the end lazily, so that no mount outlives the test."""
    for _ in range(tries):
        if (
            subprocess.run(["umount", str(mount)], check=False, capture_output=True).returncode
            == 0
        ):
            return
        time.sleep(0.1)
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@contextlib.contextmanager
def loop_mount(where: Path, *mkfs: str, sector: int = 512, size: int = 400) -> Iterator[Path]:
    """A file system on a loop device over a sparse file."""
    image, mount = where / "image", where / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(size * MIB)
    command = ["losetup", "--find", "--show", f"--sector-size={sector}", str(image)]
    device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        subprocess.run([*mkfs, device], check=True, capture_output=True)
        subprocess.run(["mount", device, str(mount)], check=True)
        try:
            yield mount
        finally:
            unmount(mount)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.mark.root
def test_a_frozen_file_system(tmp_path: Path) -> None:
    with loop_mount(tmp_path, "mkfs.ext4", "-q") as mount:
        engine = Engine(mount / "root", stall_timeout=0.3)
        try:
            freeze_and_thaw(engine, mount)
        finally:
            wait_for(engine.store.shutdown)  # else its descriptors keep the mount busy


def freeze_and_thaw(engine: Engine, mount: Path) -> None:
    engine.put(keys(20))
    subprocess.run(["fsfreeze", "--freeze", str(mount)], check=True)
    try:
        job = engine.start_store(keys(20, 100))
        wait_for(lambda: engine.store.stats().stalled)
        assert engine.held(keys(20)) == []
        assert not engine.store.shutdown(timeout=1.0)
        # Reported by now only if the hung call was a mark, with the job still queued.
        done = engine.store.take_completions()
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(mount)], check=True)
    wait_for(lambda: engine.store.pending_jobs == 0)
    done += engine.store.take_completions()
    assert [each.job_id for each in done] == [job]
    assert engine.store.shutdown()


def test_a_hung_creation_is_a_hung_disk(root: Path) -> None:
    class Stuck(Syscalls):
        def __init__(self) -> None:
            self.free = threading.Event()

        def fallocate(self, fd, length):  # type: ignore[no-untyped-def]
            self.free.wait()
            super().fallocate(fd, length)

    calls = Stuck()
    with Engine(root, syscalls=calls, stall_timeout=0.2) as engine:
        engine.start_store(keys(20))
        try:
            wait_for(lambda: engine.store.stats().stalled)
        finally:
            calls.free.set()
        engine.finish()
        wait_for(lambda: engine.held(keys(20)) == keys(20))
