# SPDX-License-Identifier: Apache-2.0
"""The store on the file systems people have: byte-exact, and the mode it says it is in."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import MIB, Engine, disk_usage, keys, wait_for
from test_store_hang import loop_mount

CHUNKS = [4096, 12288, 3_098_112, 1 * MIB]
SETTINGS: dict[str, object] = {"max_bytes": 160 * MIB, "io_bytes": 8 * MIB}


@contextlib.contextmanager
def mounted(kind: str, where: Path) -> Iterator[Path]:
    if kind == "tmpfs":
        (where / "t").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", str(where / "t")], check=True)
        try:
            yield where / "t"
        finally:
            subprocess.run(["umount", str(where / "t")], check=True)
        return
    if kind == "overlay":
        for name in ("lower", "upper", "work", "merged"):
            (where / name).mkdir()
        layers = f"lowerdir={where}/lower,upperdir={where}/upper,workdir={where}/work"
        command = ["mount", "-t", "overlay", "overlay", "-o", layers, str(where / "merged")]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("no overlay mounts here")
        try:
            yield where / "merged"
        finally:
            subprocess.run(["umount", str(where / "merged")], check=True)
        return
    name, _, sector = kind.partition("-")
    if shutil.which(f"mkfs.{name}") is None:
        pytest.skip(f"no mkfs.{name}")
    quiet = ["-q"] if name == "ext4" else ["-q", "-f"]
    with loop_mount(where, f"mkfs.{name}", *quiet, sector=int(sector)) as mount:
        yield mount


KINDS = ["ext4-512", "ext4-4096", "xfs-512", "xfs-4096", "btrfs-512", "tmpfs", "overlay"]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_byte_exact_everywhere(kind: str, tmp_path: Path) -> None:
    with mounted(kind, tmp_path) as mount:
        for chunk_bytes in CHUNKS:
            for direct_io in ("auto", "off"):
                for page_bytes in (4096, 65536):
                    root = mount / "root"
                    check(root, chunk_bytes, direct_io, page_bytes)
                    shutil.rmtree(root)


def check(root: Path, chunk_bytes: int, direct_io: str, page_bytes: int) -> None:
    wanted = keys(24)
    ways: dict[str, object] = {"direct_io": direct_io, "page_bytes": page_bytes, **SETTINGS}
    with Engine(root, chunk_bytes=chunk_bytes, rows=8, **ways) as engine:
        engine.put(wanted)
        assert engine.get(wanted) == wanted
        (stats,) = engine.store.stats().roots
        (facts,) = engine.store.describe()["roots"]  # type: ignore[misc]
        what = (root, chunk_bytes, direct_io, facts)
        assert stats.counters["direct_refusals"] == 0, what
        assert (facts["buffered_because"] is None) == stats.direct_write, what
        if direct_io == "off":
            assert not stats.direct_write
    with Engine(root, chunk_bytes=chunk_bytes, rows=8, **ways) as engine:
        assert engine.get(wanted[::-1]) == wanted[::-1], what


@pytest.mark.root
@pytest.mark.parametrize(
    ("kind", "chunk_bytes"),
    [
        ("ext4-512", 3_098_112),  # whole sectors, though not whole pages
        ("ext4-4096", 1 * MIB),
        ("xfs-512", 3_098_112),
        ("xfs-4096", 1 * MIB),
    ],
)
def test_direct_where_chunks_are_whole_sectors(
    kind: str, chunk_bytes: int, tmp_path: Path
) -> None:
    with (
        mounted(kind, tmp_path) as mount,
        Engine(mount / "root", chunk_bytes=chunk_bytes, rows=4, **SETTINGS) as engine,
    ):
        engine.put(keys(4))
        assert engine.get(keys(4)) == keys(4)
        (stats,) = engine.store.stats().roots
        assert stats.direct_write
        assert stats.direct_read


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4-512", "xfs-4096", "btrfs-512"])
def test_bound_holds_where_the_file_system_counts_its_own_blocks(
    kind: str, tmp_path: Path
) -> None:
    with mounted(kind, tmp_path) as mount:
        root = mount / "root"
        with Engine(root, max_bytes=48 * MIB, segment_bytes=1 * MIB) as engine:
            for start in range(0, 6000, 60):
                engine.put(keys(60, start))
                assert disk_usage(root) <= 48 * MIB
            assert engine.counter("evicted_segments") > 20


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4-512", "xfs-512", "btrfs-512", "tmpfs"])
def test_a_disk_smaller_than_the_bound(kind: str, tmp_path: Path) -> None:
    """Real ENOSPC: the store lives with what there is."""
    with mounted(kind, tmp_path) as mount:
        settings = {"max_bytes": 4096 * MIB, "segment_bytes": 16 * MIB}
        if kind == "tmpfs":
            subprocess.run(["mount", "-o", "remount,size=300m", str(mount)], check=True)
        with Engine(mount / "root", chunk_bytes=MIB, rows=32, **settings) as engine:
            for start in range(0, 640, 32):
                engine.put(keys(32, start))
            assert engine.counter("evicted_segments") > 5
            assert engine.get(keys(32, 608)) == keys(32, 608)
            assert engine.store.stats().roots[0].paused is None


@pytest.mark.root
@pytest.mark.slow
def test_a_quota_smaller_than_the_bound(tmp_path: Path) -> None:
    """Real EDQUOT, which btrfs gives root, too."""
    with mounted("btrfs-512", tmp_path) as mount:
        subprocess.run(["btrfs", "quota", "enable", str(mount)], check=True)
        subprocess.run(["btrfs", "qgroup", "limit", "128M", str(mount)], check=True)
        settings = {"max_bytes": 4096 * MIB, "segment_bytes": 16 * MIB}
        with Engine(mount / "root", chunk_bytes=MIB, rows=32, **settings) as engine:
            for start in range(0, 640, 32):
                engine.put(keys(32, start))
            assert engine.counter("evicted_segments") > 5
            assert engine.get(engine.held(keys(640)))
            subprocess.run(["btrfs", "qgroup", "limit", "none", str(mount)], check=True)
            wait_for(lambda: engine.store.stats().roots[0].paused is None)
            engine.put(keys(32, 1000))
            assert engine.get(keys(32, 1000)) == keys(32, 1000)
