# SPDX-License-Identifier: Apache-2.0
"""The bound where it is tight: a full root opened again, one made small, one without any."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
from harness import KIB, MIB, Engine, disk_usage, keys, segments, wait_for

from vllm_tiered_offload.store import Namespace, StoreError, geometry, small_files
from vllm_tiered_offload.store.direct_io import is_direct
from vllm_tiered_offload.store.root import slot_number
from vllm_tiered_offload.store.syscalls import Syscalls

SMALL: dict[str, object] = {"max_bytes": 16 * MIB, "segment_bytes": 512 * KIB}
# Three slots of 512 KiB.
TINY: dict[str, object] = {"max_bytes": 2900 * KIB, "segment_bytes": 512 * KIB}
GIB = 1 << 30


def within(root: Path, slots: int) -> bool:
    return all((slot_number(path.name) or 0) < slots for path in segments(root))


def test_the_probe_of_direct_io_fits_into_a_root_that_is_full(root: Path) -> None:
    class Watched(Syscalls):
        highest = 0

        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            done = super().pwritev(fd, buffers, offset)
            self.highest = max(self.highest, disk_usage(root))
            return done

    size = 16 * MIB
    bound = geometry.SLACK_BYTES + 3 * (size + geometry.SLOT_OVERHEAD_BYTES) + 16 * KIB
    settings = {"max_bytes": bound, "segment_bytes": size, "chunk_bytes": 4 * MIB, "rows": 4}
    with Engine(root, **settings) as engine:  # type: ignore[arg-type]
        engine.put(keys(3))
    for slot in range(1, 3):  # a reclaimer keeps one free; a crash may leave none
        path = root / "segments" / f"{slot:06d}.seg"
        path.write_bytes(b"")
        fd = os.open(path, os.O_RDWR)
        Syscalls().fallocate(fd, size)
        os.pwrite(fd, b"damaged", 0)
        os.close(fd)
    assert disk_usage(root) > bound - geometry.SLACK_BYTES - 3 * geometry.SLOT_OVERHEAD_BYTES
    calls = Watched()
    with Engine(root, syscalls=calls, **settings) as engine:  # type: ignore[arg-type]
        assert 0 < calls.highest <= bound
        assert engine.get(keys(3)) == keys(3)


@pytest.mark.parametrize("row_bytes", [3_098_112, 1 * MIB, 4096, 512])
def test_the_probe_tries_the_real_address_and_length(root: Path, row_bytes: int) -> None:
    tried: list[list[int]] = []

    class Watched(Syscalls):
        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            if is_direct(fd) and "direct-probe" in os.readlink(f"/proc/self/fd/{fd}"):
                tried.append([len(buffer) for buffer in buffers])
            return super().pwritev(fd, buffers, offset)

    with Engine(root, syscalls=Watched(), chunk_bytes=row_bytes, rows=4):
        ((_, row, pad),) = tried
        assert row <= 2 * 4096
        assert (row - row_bytes) % 4096 == 0
        assert (row + pad) % 4096 == 0


def test_an_idle_open_segment_above_a_smaller_bound_goes(root: Path) -> None:
    with Engine(root, **SMALL) as idle:
        idle.put(keys(300))
        with Engine(root, **{**SMALL, "max_bytes": 6 * MIB}) as other:
            slots = other.store.stats().roots[0].slots
            assert not within(root, slots)
            wait_for(lambda: within(root, slots))
            wait_for(lambda: disk_usage(root) <= 6 * MIB)
        idle.put(keys(20, 1000))
        assert idle.get(keys(20, 1000)) == keys(20, 1000)
        assert within(root, slots)


def test_two_writers_in_a_root_made_too_small_for_them(root: Path) -> None:
    """One goes on; else the two open segments leave nothing to read from."""
    with Engine(root, write_threads=2, io_bytes=64 * KIB, **SMALL) as engine:
        engine.put(keys(300))
        parts = engine.store._disks[0].parts
        assert parts.writers == 2
        with Engine(root, **TINY):
            pass
        wait_for(lambda: parts.root.slots == 3)
        assert parts.writers == 1
        wait_for(lambda: disk_usage(root) <= 2900 * KIB)
        wait_for(lambda: within(root, 3))
        for start in range(1000, 1300, 10):
            engine.put(keys(10, start))
            assert disk_usage(root) <= 2900 * KIB
        assert engine.store.stats().dropped_chunks == {}
        wait_for(lambda: engine.serves_all_it_holds(keys(300, 1000)))
        assert engine.held(keys(20, 1280)) == keys(20, 1280)
        with Engine(root, **SMALL):
            pass
        wait_for(lambda: parts.writers == 2)
        engine.put(keys(300, 2000))
        assert engine.store.stats().dropped_chunks == {}
        assert engine.get(keys(300, 2000)) == keys(300, 2000)


@pytest.mark.parametrize(("total", "writers"), [(1 * GIB, 1), (64 * GIB, 2)])
def test_a_root_without_a_bound_is_as_large_as_its_file_system(
    root: Path, total: int, writers: int
) -> None:
    class Sized(Syscalls):
        def total_bytes(self, path: str) -> int:
            return total

        def free_bytes(self, path: str) -> int:
            return total

    with Engine(root, syscalls=Sized(), max_bytes=None) as engine:
        (facts,) = engine.store.describe()["roots"]  # type: ignore[misc]
        assert facts["writers"] == writers
        there = engine.store._disks[0].parts.root
        assert there.slots == geometry.MOST_SLOTS
        assert there.slots_when_full == total * 9 // 10 // there.geometry.segment_bytes


def test_a_bound_larger_than_the_disk_is_the_disk(root: Path) -> None:
    class Sized(Syscalls):
        def total_bytes(self, path: str) -> int:
            return GIB

    settings = {"max_bytes": 64 * GIB, "segment_bytes": 64 * MIB}
    with Engine(root, syscalls=Sized(), **settings) as engine:
        (facts,) = engine.store.describe()["roots"]  # type: ignore[misc]
        assert facts["writers"] == 1
        assert engine.store._disks[0].parts.root.slots_when_full == 16


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format": 1, "page_bytes": 4096.0, "segment_bytes": 524288, "max_bytes": null}',
        '{"format": 1, "page_bytes": 4096, "segment_bytes": 524288, "max_bytes": "1"}',
        '{"format": 1, "page_bytes": 4096, "segment_bytes": 0, "max_bytes": null}',
        '{"format": 1, "page_bytes": 4096, "segment_bytes": 524288, "max_bytes": -1}',
    ],
)
def test_a_root_json_that_makes_no_sense_is_one_line(root: Path, text: str) -> None:
    root.mkdir()
    (root / "root.json").write_text(text)
    with pytest.raises(StoreError, match=r"root\.json is damaged"):
        Engine(root, **SMALL)


def test_a_small_file_that_is_a_directory_costs_no_descriptor(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for path, error in ((tmp_path, ValueError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(error):
            small_files.read_json(str(path))
    assert descriptors() == before


class SmallDisk(Syscalls):
    """A file system of 12 MiB, whatever is really there."""

    size = 12 * MIB
    least_free = size

    def __init__(self, root: Path, *, fails: bool) -> None:
        self.root, self.fails = root, fails

    def total_bytes(self, path: str) -> int:
        return self.size

    def free_bytes(self, path: str) -> int:
        used = 0
        for found in segments(self.root):
            with contextlib.suppress(FileNotFoundError):
                used += found.stat().st_size
        return self.size - used

    def fallocate(self, fd: int, length: int) -> None:
        free = self.free_bytes("") - length
        if self.fails and free < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fallocate(fd, length)
        self.least_free = min(self.least_free, free)


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_writers_on_a_disk_smaller_than_the_bound(root: Path, writers: int) -> None:
    """ENOSPC: each evicts what it needs, and none pauses the others."""
    calls = SmallDisk(root, fails=True)
    settings = {**SMALL, "max_bytes": 64 * MIB, "write_threads": writers, "io_bytes": 64 * KIB}
    with Engine(root, syscalls=calls, **settings) as engine:
        for start in range(0, 2400, 60):
            engine.put(keys(60, start))
        assert engine.store.stats().dropped_chunks == {}
        assert engine.counter("evicted_segments") > 20
        assert engine.get(keys(60, 2340)) == keys(60, 2340)


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_writers_without_a_bound_keep_to_the_free_space(root: Path, writers: int) -> None:
    calls = SmallDisk(root, fails=False)
    settings = {"max_bytes": None, "min_free_bytes": 3 * MIB, "segment_bytes": 512 * KIB}
    settings |= {"write_threads": writers, "io_bytes": 64 * KIB}
    with Engine(root, syscalls=calls, **settings) as engine:
        for start in range(0, 2400, 60):
            engine.put(keys(60, start))
        assert engine.store.stats().dropped_chunks == {}
        assert calls.least_free >= 3 * MIB
        assert len(engine.held(keys(2400))) > 150
        assert engine.serves_all_it_holds(keys(2400))


@pytest.fixture
def no_block_left(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def full(path: str, flags: int, *mode: int, **ways: int) -> int:
        if str(path).endswith(".json.new"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return real(path, flags, *mode, **ways)

    monkeypatch.setattr(small_files.os, "open", full)


def test_a_bound_can_be_made_smaller_on_a_disk_without_a_block(
    root: Path, request: pytest.FixtureRequest
) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(600))
    request.getfixturevalue("no_block_left")
    with Engine(root, **{**SMALL, "max_bytes": 6 * MIB}) as engine:
        assert disk_usage(root) <= 6 * MIB
        engine.put(keys(30, 1000))
        assert engine.get(keys(30, 1000)) == keys(30, 1000)
    found = geometry.read_geometry(str(root))
    assert found is not None
    assert found.max_bytes == 6 * MIB


def test_another_namespace_is_entered_on_a_disk_without_a_block(
    root: Path, request: pytest.FixtureRequest
) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(60))
    request.getfixturevalue("no_block_left")
    with Engine(root, namespace=Namespace("a" * 32), **SMALL) as engine:
        engine.put(keys(30))
        assert engine.get(keys(30)) == keys(30)
    with pytest.raises(StoreError, match="ENOSPC"):
        Engine(root, namespace=Namespace("b" * 32, private=True), **SMALL)
