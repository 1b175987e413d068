# SPDX-License-Identifier: Apache-2.0
"""Files that are not what they were: every one a miss and a count, none an exception."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import CHUNK, KIB, MIB, Engine, keys, segments, wait_for

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.syscalls import Syscalls

SMALL: dict[str, object] = {"max_bytes": 16 * MIB, "segment_bytes": 512 * KIB}
WANTED = keys(100)


@pytest.fixture
def filled(root: Path) -> Path:
    """Four sealed segments."""
    with Engine(root, **SMALL) as engine:
        engine.put(WANTED)
    assert len(segments(root)) == 4
    return root


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    (byte,) = path.read_bytes()[offset : offset + 1]
    change(path, offset, bytes([byte ^ 1]))


def served(root: Path) -> tuple[list[bytes], dict[str, int], dict[str, int]]:
    """What still comes back (checked byte by byte), why chunks failed, all counters."""
    with Engine(root, **SMALL) as engine:
        arrived = engine.get(engine.held(WANTED))
        stats = engine.store.stats()
        assert engine.held(set(WANTED) - set(arrived)) == []  # a miss at the next look-up
        return arrived, dict(stats.failed_chunks), dict(stats.roots[0].counters)


def test_flipped_bit_in_a_payload_loses_that_chunk(filled: Path) -> None:
    flip(segments(filled)[1], 10 * CHUNK + 77)
    arrived, failed, _ = served(filled)
    assert len(arrived) == 99
    assert failed == {"corrupt": 1}


def test_zeroed_page_in_a_payload(filled: Path) -> None:
    change(segments(filled)[0], 5 * CHUNK // 4096 * 4096, bytes(4096))
    arrived, failed, _ = served(filled)
    assert len(arrived) == 99
    assert failed == {"corrupt": 1}


def test_swapped_payloads(filled: Path) -> None:
    """Each has the right checksum, of the wrong key."""
    path = segments(filled)[0]
    data = path.read_bytes()
    first = fmt.MIN_PAGE_BYTES + fmt.table_bytes(28, 4096)
    one, two = data[first : first + CHUNK], data[first + CHUNK : first + 2 * CHUNK]
    change(path, first, two + one)
    arrived, failed, _ = served(filled)
    assert len(arrived) == 98
    assert failed == {"corrupt": 2}


@pytest.mark.parametrize("part", ["header", "footer", "trailer"])
def test_damaged_tables(filled: Path, part: str) -> None:
    path = segments(filled)[1]
    offset = {"header": 100, "footer": 508 * KIB - 4000, "trailer": 508 * KIB + 100}[part]
    flip(path, offset)
    arrived, _, counters = served(filled)
    if part == "header":
        assert len(arrived) < 80
        assert counters["damaged.header"] == 1
        assert counters["removed_leftovers"] == 1
    else:  # the extents still have their own records
        assert len(arrived) == 100
        assert counters["damaged.footer"] == 1


@pytest.mark.parametrize("length", [0, 1, 4096, 100 * KIB, 511 * KIB, 600 * KIB])
def test_files_cut_or_grown(filled: Path, length: int) -> None:
    os.truncate(segments(filled)[2], length)
    arrived, failed, _ = served(filled)
    assert len(arrived) >= 70
    assert set(failed) <= {"deleted", "corrupt"}
    if length > 512 * KIB:
        assert len(arrived) == 100


def test_over_long_files_take_from_the_bound(filled: Path) -> None:
    with Engine(filled, **SMALL) as engine:
        before = engine.store.stats().roots[0].slots
    with segments(filled)[2].open("ab") as file:
        file.write(os.urandom(3 * MIB))
    with Engine(filled, **SMALL) as engine:
        assert engine.store.stats().roots[0].slots < before - 4


def test_file_of_another_namespace_under_our_name(filled: Path) -> None:
    header = fmt.unpack_page_block(segments(filled)[0].read_bytes()[:4096], fmt.SEGMENT_MAGIC)
    change(segments(filled)[0], 0, fmt.replace(header, fingerprint="e" * 32).pack())
    arrived, failed, _ = served(filled)
    assert 60 < len(arrived) < 100
    assert failed == {}


def test_newer_version_is_left_alone(filled: Path) -> None:
    path = segments(filled)[0]
    page = bytearray(path.read_bytes()[:4096])
    page[8] = 9
    page[4088:4096] = fmt.digest(bytes(page[:4088])).to_bytes(8, "little")
    change(path, 0, bytes(page))
    before = path.read_bytes()
    with Engine(filled, **SMALL) as engine:
        for start in range(1000, 4000, 500):  # more than the root holds
            engine.put(keys(500, start))
        assert engine.counter("newer_segments") == 1
        assert engine.counter("evicted_segments") > 10
    assert path.read_bytes() == before


def test_damage_while_running(root: Path) -> None:
    with Engine(root, direct_io="off", **SMALL) as engine:
        engine.put(WANTED)
        flip(segments(root)[0], 50_000)
        arrived = engine.get(WANTED)
        assert len(arrived) == 99
        (lost,) = set(WANTED) - set(arrived)
        wait_for(lambda: engine.store.stats().chunks == 99)
        assert not engine.store.contains(lost)
        engine.put([lost])  # stored anew, it is served again
        assert engine.get([lost]) == [lost]


def test_a_bad_chunk_does_not_come_back_with_a_refresh(root: Path) -> None:
    with Engine(root, **SMALL) as writer, Engine(root, **SMALL) as reader:
        writer.put(WANTED[:10])
        wait_for(lambda: reader.held(WANTED[:10]) == WANTED[:10])
        flip(segments(root)[0], 50_000)
        assert len(reader.get(WANTED[:10])) == 9
        writer.put(WANTED[10:20])
        wait_for(lambda: len(reader.held(WANTED[:20])) >= 19)
        assert len(reader.held(WANTED[:20])) == 19


def _zero(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data) // 512) * 512
    data[at : at + 512] = bytes(512)


def _noise(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data) - 64)
    data[at : at + 64] = dice.randbytes(64)


def _shift(data: bytearray, dice: random.Random) -> None:
    at, to = (dice.randrange(len(data) // 4096) * 4096 for _ in range(2))
    data[to : to + 4096] = data[at : at + 4096]


def _cut(data: bytearray, dice: random.Random) -> None:
    del data[dice.randrange(len(data)) :]


@pytest.mark.parametrize("harm", [_zero, _noise, _shift, _cut])
def test_random_harm_never_serves_wrong_bytes(
    filled: Path, harm: Callable[[bytearray, random.Random], None]
) -> None:
    originals = {path: path.read_bytes() for path in segments(filled)}
    for seed in range(15):
        dice = random.Random(seed)
        for path, original in originals.items():
            data = bytearray(original)
            for _ in range(dice.randrange(1, 8)):
                if data:
                    harm(data, dice)
            path.write_bytes(data)
        served(filled)


@pytest.mark.parametrize("odd", ["fifo", "directory", "link"])
def test_odd_things_in_a_slot(filled: Path, odd: str) -> None:
    path = filled / "segments" / "000009.seg"
    if odd == "fifo":
        os.mkfifo(path)
    elif odd == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    arrived, _, _ = served(filled)
    assert len(arrived) == 100


def test_root_json_of_another_format_is_refused(filled: Path) -> None:
    text = (filled / "root.json").read_text()
    (filled / "root.json").write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(OSError, match="format 2"):
        Engine(filled, **SMALL)


class BadSector(Syscalls):
    """Reads that touch this place of a segment file fail."""

    def __init__(self, name: str, start: int, end: int) -> None:
        self.name, self.start, self.end = name, start, end

    def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        last = offset + sum(map(len, buffers))
        touches = offset < self.end and last > self.start
        if touches and os.readlink(f"/proc/self/fd/{fd}").endswith(self.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("where", ["header", "footer", "table"])
def test_a_bad_sector_costs_a_segment_and_not_the_start(root: Path, where: str) -> None:
    with Engine(root, **SMALL) as engine:
        engine.put(keys(60))
        engine.put(keys(60, 100))
    place = {
        "header": (0, 4096),
        "footer": (504 * KIB, 512 * KIB),
        "table": (4096, 512 * KIB),
    }[where]
    calls = BadSector("000000.seg", *place)
    with Engine(root, syscalls=calls, **SMALL) as engine:
        there = engine.held(keys(160))
        assert engine.get(there) == there
        assert len(there) >= (120 if where == "footer" else 85)
        refresher = engine.store._disks[0]._refresher
        seen = refresher._refreshes
        wait_for(lambda: refresher._refreshes > seen + 3)  # it goes on, and at its pace
        assert engine.counter("damaged.unreadable") + engine.counter("damaged.footer") >= 1
        engine.put(keys(2000, 1000))
        assert engine.store.stats().dropped_chunks == {}


class CountingBadSector(BadSector):
    tried = 0
    bad = True

    def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        try:
            return super().preadv(fd, buffers, offset)
        except OSError:
            self.tried += 1
            if self.bad:
                raise
            return os.preadv(fd, buffers, offset)


def refresh_some_times(engine: Engine) -> None:
    refresher = engine.store._disks[0]._refresher
    seen = refresher._refreshes
    wait_for(lambda: refresher._refreshes > seen + 5)


def test_a_bad_sector_in_a_segment_that_is_followed_is_tried_ever_more_rarely(
    root: Path,
) -> None:
    """A disk may take half a minute for each try, and every try holds up the refresh."""
    calls, now = CountingBadSector("000000.seg", 4096, 512 * KIB), [100.0]
    with (
        Engine(root, **SMALL) as writer,
        Engine(root, syscalls=calls, clock=lambda: now[0], **SMALL) as reader,
    ):
        writer.put(keys(20))
        wait_for(lambda: calls.tried)
        for _ in range(3):
            before = calls.tried
            refresh_some_times(reader)
            assert calls.tried == before  # not yet
            now[0] += 1000
            wait_for(lambda: calls.tried > before)
        assert reader.counter("damaged.unreadable") == 1
        calls.bad = False
        now[0] += 1000
        wait_for(lambda: reader.held(keys(20)) == keys(20))
        assert reader.get(keys(20)) == keys(20)


def test_a_header_that_cannot_be_read_is_tried_ever_more_rarely(filled: Path) -> None:
    calls, now = CountingBadSector("000001.seg", 0, 4096), [100.0]
    with Engine(filled, syscalls=calls, clock=lambda: now[0], **SMALL) as engine:
        before = calls.tried
        assert before
        for n in range(5):  # the directory changes, and is listed
            (filled / "segments" / f"note{n}").touch()
            refresh_some_times(engine)
        assert calls.tried == before
        calls.bad = False
        now[0] += 1000
        wait_for(lambda: engine.held(WANTED) == WANTED)
        assert engine.get(WANTED) == WANTED


def test_what_is_no_file_any_more_takes_its_chunks_along(filled: Path) -> None:
    with Engine(filled, **SMALL) as engine:
        path = segments(filled)[0]
        path.unlink()
        os.mkfifo(path)
        wait_for(lambda: len(engine.held(WANTED)) < 100)
        there = engine.held(WANTED)
        assert engine.get(there) == there
