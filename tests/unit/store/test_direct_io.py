# SPDX-License-Identifier: Apache-2.0
"""Transfers: long lists, short counts, refusals; and what the descriptor says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from harness import KIB, MIB, Engine, keys, page_aligned

from vllm_tiered_offload.store import StoreError
from vllm_tiered_offload.store.direct_io import (
    IOV_MAX,
    BlockIO,
    ShortTransferError,
    is_direct,
    refusal,
)
from vllm_tiered_offload.store.syscalls import DirectAlignment, Syscalls

PAGE = 4096


class Bent(Syscalls):
    """System calls that refuse or cut as told."""

    def __init__(self, refuse: str = "", times: int = 10**9, cut: int = 0) -> None:
        self.refuse, self.times, self.cut = refuse, times, cut
        self.armed = True
        self.calls: list[tuple[int, int]] = []

    def _maybe_refuse(self, what: str, direct: bool) -> None:
        if self.armed and what == self.refuse and direct and self.times > 0:
            self.times -= 1
            raise OSError(errno.EINVAL, "armed")

    def open(self, path, flags, mode=0o600):  # type: ignore[no-untyped-def]
        self._maybe_refuse("open", bool(flags & os.O_DIRECT) and path.endswith(".seg"))
        return super().open(path, flags, mode)

    def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        self._maybe_refuse("write", is_direct(fd) and len(buffers) > 1)
        self.calls.append((len(buffers), offset))
        return super().pwritev(fd, self._cut(buffers), offset)

    def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        self._maybe_refuse("read", is_direct(fd))
        self.calls.append((len(buffers), offset))
        return super().preadv(fd, self._cut(buffers), offset)

    def _cut(self, buffers):  # type: ignore[no-untyped-def]
        if not self.cut:
            return buffers
        kept, left = [], self.cut
        for buffer in buffers:
            kept.append(buffer[:left])
            left -= len(kept[-1])
            if not left:
                break
        return kept


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * MIB))
    return path


def random_pages(count: int) -> list[memoryview]:
    memory = page_aligned(count * PAGE)
    memory[:] = os.urandom(count * PAGE)
    return [memory[n * PAGE : (n + 1) * PAGE] for n in range(count)]


@pytest.mark.parametrize("direct", [True, False])
def test_more_buffers_than_one_call_carries(file: Path, direct: bool) -> None:
    calls = Bent()
    io = BlockIO(calls, PAGE, direct=direct)
    fd = io.open(str(file), os.O_RDWR)
    pages = random_pages(IOV_MAX + 500)
    io.write(fd, pages, PAGE)
    assert [count for count, _ in calls.calls] == [IOV_MAX, 500]
    back = random_pages(IOV_MAX + 500)
    assert io.read(fd, back, PAGE) == (IOV_MAX + 500) * PAGE
    assert [bytes(page) for page in back] == [bytes(page) for page in pages]
    assert io.refusals == 0


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cut", [PAGE, 5 * PAGE, 5 * PAGE + 512, 7 * PAGE - 512])
def test_short_counts_go_on_at_a_multiple_of_the_alignment(
    file: Path, direct: bool, cut: int
) -> None:
    calls = Bent(cut=cut)
    io = BlockIO(calls, PAGE, direct=direct)
    fd = io.open(str(file), os.O_RDWR)
    pages = random_pages(40)
    io.write(fd, pages, 0)
    assert all(offset % PAGE == 0 for _, offset in calls.calls)
    assert file.read_bytes()[: 40 * PAGE] == b"".join(map(bytes, pages))
    back = random_pages(40)
    assert io.read(fd, back, 0) == 40 * PAGE
    assert [bytes(page) for page in back] == [bytes(page) for page in pages]


def test_reading_past_the_end_says_how_far_it_came(file: Path) -> None:
    os.truncate(file, 10 * PAGE + 512)
    io = BlockIO(Syscalls(), PAGE, direct=True)
    fd = io.open(str(file), os.O_RDONLY)
    assert io.read(fd, random_pages(16), 4 * PAGE) == 6 * PAGE + 512
    assert io.read(fd, random_pages(16), 16 * PAGE) == 0


def test_a_write_that_makes_no_progress_is_an_error(file: Path) -> None:
    class Stuck(Syscalls):
        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            return 512

    io = BlockIO(Stuck(), PAGE, direct=True)
    with pytest.raises(ShortTransferError):
        io.write(io.open(str(file), os.O_RDWR), random_pages(4), 0)


@pytest.mark.parametrize("where", ["write", "read"])
def test_one_refusal_is_retried_buffered_and_forgiven(file: Path, where: str) -> None:
    io = BlockIO(Bent(where, times=1), PAGE, direct=True)
    fd = io.open(str(file), os.O_RDWR)
    pages = random_pages(4)
    io.write(fd, pages, 0)
    back = random_pages(4)
    io.read(fd, back, 0)
    assert [bytes(page) for page in back] == [bytes(page) for page in pages]
    assert (io.refusals, io.direct, is_direct(fd)) == (1, True, True)


@pytest.mark.parametrize("where", ["open", "write", "read"])
def test_repeated_refusals_turn_direct_io_off(root: Path, where: str) -> None:
    wanted = keys(200)
    calls = Bent(where)
    calls.armed = False  # the probe at the start goes through
    with Engine(root, syscalls=calls, segment_bytes=512 * KIB) as engine:
        calls.armed = True
        for start in range(0, 200, 20):
            engine.put(wanted[start : start + 20])
            assert engine.get(wanted[: start + 20]) == wanted[: start + 20]
        (stats,) = engine.store.stats().roots
        assert stats.counters["direct_refusals"] >= 3
        assert not stats.direct_write
        assert not stats.direct_read
    with Engine(root) as engine:
        assert engine.get(wanted) == wanted


def test_buffered_writes_reach_the_disk_before_their_keys_are_known(root: Path) -> None:
    order: list[str] = []

    class Watched(Syscalls):
        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            if len(buffers) > 1:
                order.append("write")
            return super().pwritev(fd, buffers, offset)

        def fdatasync(self, fd):  # type: ignore[no-untyped-def]
            order.append(f"sync, {len(engine.held(keys(5)))} known")
            super().fdatasync(fd)

    with Engine(root, direct_io="off", syscalls=Watched()) as engine:
        order.clear()
        engine.put(keys(5))
        assert order[:3] == ["sync, 0 known", "write", "sync, 0 known"] or order[:2] == [
            "write",
            "sync, 0 known",
        ]


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (DirectAlignment(0, 0), "reports no direct I/O"),
        (DirectAlignment(512, 65536), "wants 65536"),
        (DirectAlignment(65536, 512), "wants 65536 in memory"),
    ],
)
def test_what_the_file_system_says_is_believed(
    tmp_path: Path, says: DirectAlignment, reason: str
) -> None:
    class Saying(Syscalls):
        def direct_alignment(self, fd):  # type: ignore[no-untyped-def]
            return says

    why = refusal(str(tmp_path), Saying(), PAGE, page_aligned(PAGE), page_aligned(PAGE)[:0])
    assert why is not None
    assert reason in why
    assert list(tmp_path.iterdir()) == []


def test_direct_io_that_is_required_and_refused_is_an_error(root: Path) -> None:
    class Refusing(Syscalls):
        def direct_alignment(self, fd):  # type: ignore[no-untyped-def]
            return DirectAlignment(0, 0)

    with pytest.raises(StoreError, match="direct_io = 'on'"):
        Engine(root, syscalls=Refusing(), direct_io="on")
    with Engine(root, syscalls=Refusing()) as engine:
        (facts,) = engine.store.describe()["roots"]  # type: ignore[misc]
        assert not facts["direct_io"]
        assert "no direct I/O" in facts["buffered_because"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_errors_of_the_probe_are_reported_as_what_they_are(root: Path, code: int) -> None:
    class Failing(Syscalls):
        def open(self, path, flags, mode=0o600):  # type: ignore[no-untyped-def]
            if "direct-probe" in path:
                raise OSError(code, os.strerror(code), path)
            return super().open(path, flags, mode)

    with pytest.raises(StoreError, match=errno.errorcode[code]):
        Engine(root, syscalls=Failing())


def test_a_page_as_large_as_the_file_system_wants(root: Path) -> None:
    class Large(Syscalls):
        def direct_alignment(self, fd):  # type: ignore[no-untyped-def]
            return DirectAlignment(512, 16384)

    with Engine(root, syscalls=Large()) as engine:
        (facts,) = engine.store.describe()["roots"]  # type: ignore[misc]
        assert facts["page_bytes"] == 16384
        engine.put(keys(20))
        assert engine.get(keys(20)) == keys(20)


def test_the_refusal_that_turns_direct_io_off_still_makes_its_file(tmp_path: Path) -> None:
    """open(2) makes the file before it refuses O_DIRECT: the second try finds it there."""

    class Late(Syscalls):
        def open(self, path, flags, mode=0o600):  # type: ignore[no-untyped-def]
            fd = super().open(path, flags & ~os.O_DIRECT, mode)
            if flags & os.O_DIRECT:
                os.close(fd)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return fd

    io = BlockIO(Late(), PAGE, direct=True)
    for n in range(4):
        os.close(io.open(str(tmp_path / f"{n}"), os.O_RDWR | os.O_CREAT | os.O_EXCL))
    assert not io.direct
    with pytest.raises(FileExistsError):
        io.open(str(tmp_path / "0"), os.O_RDWR | os.O_CREAT | os.O_EXCL)
