# SPDX-License-Identifier: Apache-2.0
"""Who is given the memory, over which name, and what happens where neither works."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.region_process import eventually, fill, holdings, wrong_slots
from vllm_tiered_offload.region import backing, meeting, rendezvous, wire
from vllm_tiered_offload.region.claim import Claim, name_of
from vllm_tiered_offload.region.shared_region import (
    RegionError,
    RegionSettings,
    SharedOffloadRegion,
)

QUICK = RegionSettings(join_timeout=0.5)


def alone(engine: dict[str, Any], **more: Any) -> dict[str, Any]:
    return engine | {"world_size": 1} | more


def share_and_close(engine: dict[str, Any]) -> SharedOffloadRegion:
    worker = SharedOffloadRegion(rank=0, **alone(engine))
    scheduler = SharedOffloadRegion(rank=None, **alone(engine))
    fill(worker, 0)
    assert wrong_slots(scheduler, 1) == []
    worker.cleanup()
    scheduler.cleanup()
    return worker


def claim(**fields: Any) -> Claim:
    sizes = {"num_chunks": 1, "row_bytes": 4096, "slot_bytes": 1, "world_size": 1}
    return Claim.make(
        **({"engine_id": "e", "backing": "memfd", "huge_pages": "auto"} | sizes | fields)
    )


# Names.


def test_the_directory_is_private_and_its_socket_goes(
    engine: dict[str, Any], runtime_directory: Path
) -> None:
    worker = SharedOffloadRegion(rank=0, **alone(engine))
    (directory,) = runtime_directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(list(directory.iterdir())) == 1
    scheduler = SharedOffloadRegion(rank=None, **alone(engine))
    assert eventually(lambda: list(directory.iterdir()) == [])
    worker.cleanup()
    scheduler.cleanup()


def test_a_directory_that_others_can_enter_is_not_used(
    engine: dict[str, Any], runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(runtime_directory))
    directory = runtime_directory / f"vllm-tiered-offload-{os.geteuid()}"
    directory.mkdir(mode=0o755)
    place = rendezvous.find_place(name_of("x"))
    assert place.address.startswith("\0vllm-tiered-offload-")
    assert len(place.address) < 100
    share_and_close(engine)  # over the abstract name
    assert list(directory.iterdir()) == []


@pytest.mark.root
def test_a_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "squatted").mkdir(mode=0o700)
    os.chown(tmp_path / "squatted", 12345, 12345)
    with pytest.raises(PermissionError):
        rendezvous.open_private_directory(str(tmp_path / "squatted"))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError):
        rendezvous.open_private_directory(str(tmp_path / "link"))


def test_a_path_too_long_for_a_socket(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert isinstance(rendezvous.find_place(name_of("x")), rendezvous.DirectoryPlace)
    share_and_close(engine)


def test_no_sockets_at_all_means_the_file_and_says_so(
    engine: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    no_leftovers_in_shm: None,
) -> None:
    def refuse(*_: object) -> socket.socket:
        raise rendezvous.SocketsUnavailable("no unix sockets: Operation not permitted")

    monkeypatch.setattr(rendezvous, "new_socket", refuse)
    worker = SharedOffloadRegion(rank=0, **alone(engine))
    assert worker.describe()["backing"] == "shm"
    assert "no unix sockets: Operation not permitted; using a file in /dev/shm" in caplog.text
    scheduler = SharedOffloadRegion(rank=None, **alone(engine))
    fill(worker, 0)
    assert wrong_slots(scheduler, 1) == []
    worker.cleanup()
    scheduler.cleanup()
    explicit = alone(engine, settings=RegionSettings(huge_pages="2MB"))
    with pytest.raises(RegionError, match="huge_pages '2MB' needs a memfd"):
        SharedOffloadRegion(rank=0, **explicit)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_no_memfd_means_the_file(
    number: int, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "memfd_create", refuse)
    worker = SharedOffloadRegion(rank=0, **alone(engine))
    assert worker.describe()["backing"] == "shm"
    worker.cleanup()


def test_the_abstract_name_is_taken_by_somebody_else(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who got there first learns nothing and is named."""
    monkeypatch.setattr(rendezvous, "base_directories", list)
    place = rendezvous.find_place(name_of(engine["engine_id"]))
    with place.listen() as squatter:
        served = threading.Thread(target=_answer_anything, args=(squatter,), daemon=True)
        served.start()
        monkeypatch.setattr(os, "geteuid", lambda real=os.geteuid(): real + 1)
        monkeypatch.setattr(
            "vllm_tiered_offload.region.socket_meeting.find_place", lambda _: place
        )
        with pytest.raises(RegionError, match=r"is not ours: process .* belongs to user"):
            SharedOffloadRegion(rank=0, **alone(engine, settings=QUICK))


def _answer_anything(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        wire.receive(connection)
        fd = os.memfd_create("trap")
        wire.send(connection, {"ok": True, "pid": os.getpid()}, fd)
        os.close(fd)
        time.sleep(1)


# Peers.


def test_who_may_have_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    assert wire.Peer(12, uid).objection(12) == ""
    assert "belongs to user" in wire.Peer(12, uid + 1).objection(12)
    assert "another container" in wire.Peer(0, uid).objection(12)  # not visible from here
    assert "another container" in wire.Peer(12, uid).objection(1)  # another pid namespace
    assert "another container" in wire.Peer(12, uid).objection(None)


def test_a_stranger_gets_no_descriptor(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = SharedOffloadRegion(rank=0, **alone(engine))
    place = rendezvous.find_place(name_of(engine["engine_id"]))
    for hello in (
        {"pid": os.getpid() + 1, "rank": None, "token": "x"},
        {"pid": os.getpid(), "rank": None, "token": "x"},
        {"pid": os.getpid(), "rank": "first", "claim": []},
    ):
        with _connected(place) as sock:
            wire.send(sock, hello)
            answer, fd = wire.receive(sock)
            assert "refused" in answer
            assert fd is None
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\5nonsense"):
        with _connected(place) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    SharedOffloadRegion(rank=None, **alone(engine)).cleanup()  # still serves its own
    worker.cleanup()


@contextlib.contextmanager
def _connected(place: rendezvous.Place) -> Any:
    sock = place.connect()
    assert sock is not None
    with sock:
        sock.settimeout(5)
        yield sock


@pytest.mark.parametrize("field", ["pid", "mnt"])
def test_a_process_of_another_container_has_another_token(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = claim()
    real = os.readlink
    monkeypatch.setattr(
        os, "readlink", lambda p: "other" if p == f"/proc/self/ns/{field}" else real(p)
    )
    there = claim()
    assert here.token != there.token
    assert "container" in here.differences(there.to_json())


def test_the_token_covers_the_whole_claim() -> None:
    changed = {
        "engine_id": "f", "num_chunks": 2, "row_bytes": 8192, "slot_bytes": 2,
        "world_size": 2, "backing": "shm", "huge_pages": "off", "protocol": 2,
    }  # fmt: skip
    assert {*changed, "container"} == set(claim().to_json())
    tokens = {claim(**{name: value}).token for name, value in changed.items()}
    assert len(tokens | {claim().token}) == len(changed) + 1


# Descriptors.


def test_a_descriptor_received_is_closed_on_exec() -> None:
    left, right = socket.socketpair()
    with left, right, open(os.devnull) as file:
        wire.send(left, {"a": "ü" * 20_000}, file.fileno())
        message, fd = wire.receive(right)
        assert message == {"a": "ü" * 20_000}
        assert fd is not None
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(fd)


def test_a_descriptor_in_a_broken_message_is_not_leaked() -> None:
    left, right = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    with left, right, open(os.devnull) as file:
        socket.send_fds(left, [b"\0\0\0\7garbage"], [file.fileno()])
        with pytest.raises(EOFError):
            wire.receive(right)
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_the_size_is_sealed() -> None:
    fd = backing.make_memfd(8192)
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    backing.check_received(fd, 8192)
    with pytest.raises(RegionError, match="8192 bytes, 4096 were expected"):
        backing.check_received(fd, 4096)
    os.close(fd)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(RegionError, match="not sealed"):
        backing.check_received(unsealed, 4096)
    os.close(unsealed)


def test_no_descriptor_is_left_open(engine: dict[str, Any]) -> None:
    share_and_close(engine)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        share_and_close(engine)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert holdings() == []


def test_only_the_creator_keeps_a_descriptor_and_only_until_all_have_it(
    engine: dict[str, Any],
) -> None:
    worker = SharedOffloadRegion(rank=0, **alone(engine))
    assert len([h for h in holdings() if h.startswith("/memfd")]) == 1
    scheduler = SharedOffloadRegion(rank=None, **alone(engine))
    assert eventually(lambda: [h for h in holdings() if h.startswith("/memfd")] == [])
    worker.cleanup()
    scheduler.cleanup()


def test_open_meeting_follows_the_backing_asked_for(engine: dict[str, Any]) -> None:
    worker = SharedOffloadRegion(
        rank=0, **alone(engine, settings=RegionSettings(backing="shm"))
    )
    assert worker.describe()["backing"] == "shm"
    assert meeting.FileMeeting.__name__ == "FileMeeting"
    worker.cleanup()
