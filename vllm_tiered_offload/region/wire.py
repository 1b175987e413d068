# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes of one engine: a length, JSON, perhaps a descriptor."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_tiered_offload.region.settings import RegionError

MAX_FACTS_BYTES = 1 << 20
_MAX_MESSAGE_BYTES = 1 << 28
_LENGTH = struct.Struct("!I")
_INT = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return cls(pid, uid)

    def objection(self, claimed_pid: object) -> str:
        """Why this peer may not share our memory; "" when it may.

        A pid that differs from what the peer takes for its own means another
        pid namespace, hence another container (0: not visible from here).
        """
        if self.uid != os.geteuid():
            return f"process {self.pid} belongs to user {self.uid}, not {os.geteuid()}"
        if self.pid <= 0 or self.pid != claimed_pid:
            return f"process {claimed_pid} runs in another container"
        return ""


def encode_facts(facts: Mapping[str, object] | None) -> dict[str, object]:
    """The facts as plain JSON values; `RegionError` when they are not, or too long."""
    try:
        text = json.dumps(dict(facts or {}))
    except (TypeError, ValueError) as error:
        raise RegionError(f"facts for the scheduler are not JSON: {error}") from None
    if len(text) > MAX_FACTS_BYTES:
        raise RegionError(f"facts for the scheduler take {len(text)} bytes, over 1 MiB")
    return dict(json.loads(text))


def send(sock: socket.socket, message: Mapping[str, object], fd: int | None = None) -> None:
    """Send one message, with `fd` when given; raises `OSError`."""
    payload = json.dumps(message).encode()
    data = _LENGTH.pack(len(payload)) + payload
    sent = 0
    if fd is not None:
        sent = socket.send_fds(sock, [data], [fd])
    sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[dict[str, object], int | None]:
    """One message and its descriptor; raises `EOFError` when the peer is gone, `OSError`."""
    head, fd = _receive_head(sock)
    try:
        head += _receive_exactly(sock, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > _MAX_MESSAGE_BYTES:
            raise EOFError(f"a message of {length} bytes is not one of ours")
        message = json.loads(_receive_exactly(sock, length))
        if not isinstance(message, dict):
            raise EOFError("not one of our messages")
    except ValueError as error:
        _close_quietly(fd)
        raise EOFError("not one of our messages") from error
    except BaseException:
        _close_quietly(fd)
        raise
    return message, fd


def _receive_head(sock: socket.socket) -> tuple[bytes, int | None]:
    # Not socket.recv_fds: it ignores its flags, and without close-on-exec a
    # subprocess started in between would keep the memory alive.
    room = socket.CMSG_SPACE(_INT.size)
    head, ancillary, _, _ = sock.recvmsg(_LENGTH.size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS and len(data) >= _INT.size:
            return head, _INT.unpack_from(data)[0]
    return head, None


def _close_quietly(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError("the peer is gone")
        data += piece
    return bytes(data)
