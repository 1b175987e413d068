# SPDX-License-Identifier: Apache-2.0
"""The creator's side of the hand-over: gives the memory to those who may have it.

One short-lived thread a connection; a joiner stays connected until the
hand-over is over, so that its death frees its rank. Messages (see `wire`):

    joiner  -> {pid, rank, token, claim, facts, partial}
    creator -> {ok, ranks: {rank: facts}} + descriptor | {refused, kind} | {waiting: [ranks]}
    joiner  -> {mapped}
    creator -> {ranks: [ranks]}            once all ranks have mapped the region
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from typing import Any

from vllm_tiered_offload.region.claim import Claim
from vllm_tiered_offload.region.forks import PrivateFd, keep_private
from vllm_tiered_offload.region.patience import duplicate
from vllm_tiered_offload.region.rendezvous import Place
from vllm_tiered_offload.region.roster import Roster
from vllm_tiered_offload.region.seat import Awaited, logger
from vllm_tiered_offload.region.wire import Peer, receive, send

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_HELLO_TIMEOUT = 30.0  # seconds for a peer's next message; it has nothing else to do


class Refused(Exception):
    """This peer gets nothing; `kind` tells it whether trying again makes sense."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class HandOver:
    """Serves the region's descriptor until everybody has it.

    Args:
        claim: what a joiner has to expect too.
        place: the name that `listener` is bound to.
        fd: the memory; owned by the hand-over and closed with it.
        scheduler_joins: False when the workers are all there is.
    """

    def __init__(
        self,
        claim: Claim,
        place: Place,
        listener: socket.socket,
        fd: PrivateFd,
        scheduler_joins: bool,
    ) -> None:
        self._claim = claim
        self._place = place
        self._listener = listener
        self._fd = fd
        self._scheduler_joins = scheduler_joins
        self.roster = Roster(claim.world_size)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._waiting: set[socket.socket] = set()  # have mapped, await the others
        self._told: set[str] = set()
        self._closed = False
        self._owner = os.getpid()

    def start(self, rank: int, facts: dict[str, object]) -> None:
        """Serve from now on; the creator itself is `rank`."""
        self.roster.enter(rank, os.getpid(), facts)
        self._run(self._accept)
        self._run(self._say_who_is_awaited)

    def _say_who_is_awaited(self) -> None:
        awaited = Awaited(self._claim.engine_id)
        while not self._closed and self.roster.wait_until_complete(1.0) is None:
            awaited.tell(self.roster.missing())

    def _run(self, target: Any, *args: Any) -> None:
        threading.Thread(target=target, args=args, name="region-handover", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    time.sleep(1.0)
                    continue
                return  # closed
            keep_private(connection)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            self._run(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        # ValueError: closed in the meantime, or a message that is not ours.
        with contextlib.suppress(OSError, EOFError, ValueError), connection:
            try:
                connection.settimeout(_HELLO_TIMEOUT)
                hello = self._hello(connection)
                if hello.get("rank") is None:
                    self._serve_scheduler(connection, hello)
                else:
                    self._serve_worker(connection, hello)
            except Refused as refusal:
                self._refuse(connection, refusal)
        with self._lock:
            self._connections.discard(connection)
            self._waiting.discard(connection)

    def _refuse(self, connection: socket.socket, refusal: Refused) -> None:
        reason = str(refusal)
        if reason not in self._told:  # it will ask again, many times
            self._told.add(reason)
            logger.warning("Region of engine %s: %s", self._claim.engine_id, reason)
        answer = {"pid": os.getpid(), "refused": reason, "kind": refusal.kind}
        send(connection, answer)

    def _hello(self, connection: socket.socket) -> dict[str, Any]:
        hello, fd = receive(connection)
        if fd is not None:
            os.close(fd)
        objection = Peer.of(connection).objection(hello.get("pid"))
        if objection:
            raise Refused("stranger", f"refused: {objection}")
        if hello.get("token") != self._claim.token:
            theirs = hello.get("claim")
            differences = self._claim.differences(theirs if isinstance(theirs, dict) else {})
            raise Refused(
                "another engine",
                f"process {hello.get('pid')} expects another region: {differences}",
            )
        return hello

    def _give(self, connection: socket.socket, extra: dict[str, object]) -> None:
        send(connection, {"ok": True, "pid": os.getpid(), **extra}, self._fd.fileno())
        receive(connection)  # the joiner has mapped it

    def _serve_worker(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        rank, pid = int(hello["rank"]), int(hello["pid"])
        if not 0 <= rank < self._claim.world_size:
            raise Refused(
                "another engine", f"rank {rank} is not one of {self._claim.world_size}"
            )
        holder = self.roster.enter(rank, pid, hello.get("facts") or {})
        if holder is not None:
            raise Refused(
                "another engine",
                duplicate(rank, holder, self._claim.engine_id),
            )
        try:
            self._give(connection, {})
            with self._lock:
                self._waiting.add(connection)
            self.mark_mapped(rank)
            connection.settimeout(None)
            receive(connection)  # returns when the joiner is gone
        finally:
            self.roster.leave(rank)

    def _serve_scheduler(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        missing = self.roster.missing()
        if missing and not hello.get("partial"):
            send(connection, {"pid": os.getpid(), "waiting": missing})
            return
        self._give(connection, {"ranks": self.roster.facts()})
        if not missing:
            self.close()

    def mark_mapped(self, rank: int) -> None:
        """`rank` has the region mapped; tells everybody when it was the last."""
        if not self.roster.mark_mapped(rank):
            return
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for connection in waiting:
            with contextlib.suppress(OSError):
                send(connection, {"ranks": list(range(self._claim.world_size))})
        if not self._scheduler_joins:
            self.close()

    def close(self, reason: str = "") -> None:
        """Stop serving and close the descriptor; idempotent. `reason` goes to the waiting."""
        if os.getpid() != self._owner:
            return  # a forked child: the name is not its own
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, connections = self._waiting, self._connections
            self._waiting, self._connections = set(), set()
        with self._place.locked():
            self._place.remove_name()
            _hang_up(self._listener)
        for connection in waiting if reason else ():
            with contextlib.suppress(OSError):
                send(connection, {"refused": reason, "kind": "failed"})
        for connection in connections:
            _hang_up(connection)
        self._fd.close()


def _hang_up(sock: socket.socket) -> None:
    # Closing alone would not wake a thread that waits in accept or recv.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
