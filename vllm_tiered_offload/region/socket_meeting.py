# SPDX-License-Identifier: Apache-2.0
"""Meeting over a unix socket: the first worker makes the memory, the others are given it."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from vllm_tiered_offload.region import backing
from vllm_tiered_offload.region.claim import name_of
from vllm_tiered_offload.region.forks import PrivateFd
from vllm_tiered_offload.region.handover import HandOver
from vllm_tiered_offload.region.patience import Patience
from vllm_tiered_offload.region.rendezvous import find_place
from vllm_tiered_offload.region.seat import CreatorDied, Joining, Seat
from vllm_tiered_offload.region.settings import RegionError
from vllm_tiered_offload.region.wire import Peer, receive, send

_POLL = 0.1
# Another process was faster; its queue is full; it went away just now.
_TRY_AGAIN = (errno.EADDRINUSE, errno.EAGAIN, errno.ECONNRESET)


class CreatorSeat(Seat):
    """Of the worker that made the memory; serves it to the others."""

    backing = "memfd"
    created = True

    def __init__(self, joining: Joining, handover: HandOver, fd: PrivateFd) -> None:
        assert joining.rank is not None
        self._joining = joining
        self._rank = joining.rank
        self._handover = handover
        self._fd = fd
        handover.start(self._rank, joining.facts)

    def fileno(self) -> int:
        return self._fd.fileno()

    def mapped(self) -> None:
        self._handover.mark_mapped(self._rank)

    @property
    def ranks(self) -> dict[int, dict[str, object]]:
        roster = self._handover.roster
        return roster.wait_until_complete(0.0) or roster.facts()

    def wait_for_all(self, deadline: float) -> bool:
        seconds = max(deadline - self._joining.clock(), 0.0)
        return self._handover.roster.wait_until_complete(seconds) is not None

    def close(self, reason: str = "") -> None:
        self._handover.close(reason)


class JoinerSeat(Seat):
    """Of a worker or the scheduler that was given the memory."""

    backing = "memfd"

    def __init__(
        self, joining: Joining, sock: socket.socket, fd: PrivateFd, welcome: dict[str, Any]
    ) -> None:
        self._joining = joining
        self._sock = sock
        self._fd = fd
        self._ranks = {int(rank): facts for rank, facts in welcome.get("ranks", {}).items()}

    @property
    def ranks(self) -> dict[int, dict[str, object]]:
        return self._ranks

    def fileno(self) -> int:
        return self._fd.fileno()

    def mapped(self) -> None:
        self._fd.close()
        try:
            send(self._sock, {"mapped": True})
        except OSError as error:
            raise CreatorDied from error

    def wait_for_all(self, deadline: float) -> bool:
        self._sock.settimeout(max(deadline - self._joining.clock(), 0.001))
        try:
            message, _ = receive(self._sock)
        except TimeoutError:
            return False
        except (EOFError, OSError) as error:
            raise CreatorDied from error
        if "refused" in message:
            raise RegionError(f"the region was given up by its maker: {message['refused']}")
        self._ranks = {rank: {} for rank in range(self._joining.claim.world_size)}
        return True

    def close(self, reason: str = "") -> None:
        self._fd.close()
        self._sock.close()


class SocketMeeting:
    """Chooses the creator and takes a seat; one object an attempt to join.

    Raises `SocketsUnavailable` where there are no unix sockets.
    """

    def __init__(self, joining: Joining) -> None:
        self._joining = joining
        self._place = find_place(name_of(joining.claim.engine_id))
        self._deadline = joining.clock() + joining.timeout
        self._patience = Patience(joining)

    def take_seat(self, check: Callable[[str], None]) -> Seat:
        """A seat; `check` is called with the backing when this process is to create it.

        Raises `RegionError`: refused, too late, or what `check` raises.
        """
        while True:
            sock, listener = self._meet()
            if listener is not None:
                return self._create(listener, check)
            seat = None if sock is None else self._ask(sock)
            if seat is not None:
                return seat
            time.sleep(_POLL)

    def _meet(self) -> tuple[socket.socket | None, socket.socket | None]:
        """A connection to the creator, or a listening socket when this is the creator."""
        with self._place.locked():
            try:
                sock = self._place.connect()
                if sock is not None:
                    return sock, None
                if self._joining.rank is None:
                    self._patience.nobody()
                    return None, None
                self._place.remove_leftovers()
                return None, self._place.listen()
            except OSError as error:
                if error.errno not in _TRY_AGAIN:
                    raise
                self._check_deadline(f"{self._place.shown} stays busy")
                return None, None

    def _create(self, listener: socket.socket, check: Callable[[str], None]) -> Seat:
        joining = self._joining
        try:
            check(CreatorSeat.backing)
            fd = PrivateFd(backing.make_memfd(joining.length, joining.huge_bytes))
        except BaseException:
            with self._place.locked():
                self._place.remove_name()
                listener.close()
            raise
        handover = HandOver(joining.claim, self._place, listener, fd, joining.scheduler_joins)
        return CreatorSeat(joining, handover, fd)

    def _ask(self, sock: socket.socket) -> Seat | None:
        """A seat if the creator gives one; None when asking again makes sense."""
        try:
            answer, fd = self._exchange(sock)
        except (EOFError, OSError):
            sock.close()  # it died, or has finished with another engine of this id
            self._check_deadline("the process that makes it does not answer")
            return None
        objection = Peer.of(sock).objection(answer.get("pid"))
        if fd is not None and not objection:
            return self._sit(sock, fd, answer)
        if fd is not None:
            os.close(fd)
        sock.close()
        self._consider(answer, objection)
        return None

    def _sit(self, sock: socket.socket, fd: int, answer: dict[str, Any]) -> Seat:
        seat = JoinerSeat(self._joining, sock, PrivateFd(fd), answer)
        try:
            backing.check_received(fd, self._joining.length)
        except RegionError:
            seat.close()
            raise
        return seat

    def _exchange(self, sock: socket.socket) -> tuple[dict[str, Any], int | None]:
        joining = self._joining
        # At least a second: what it says at the last attempt is the better error.
        sock.settimeout(max(self._deadline - joining.clock(), 1.0))
        hello = {
            "pid": os.getpid(),
            "rank": joining.rank,
            "token": joining.claim.token,
            "claim": joining.claim.to_json(),
            "facts": joining.facts,
            "partial": self._patience.is_over(),
        }
        send(sock, hello)
        return receive(sock)

    def _consider(self, answer: dict[str, Any], objection: str) -> None:
        """Return when to ask again later, else raise."""
        if objection:
            raise RegionError(f"{self._place.shown} is not ours: {objection}")
        if "waiting" in answer:
            self._patience.incomplete()
            return
        reason = str(answer.get("refused", "its answer makes no sense"))
        if answer.get("kind") != "another engine":
            raise RegionError(f"{self._place.shown}: {reason}")
        self._patience.refused(reason)

    def _check_deadline(self, reason: str) -> None:
        if self._joining.clock() >= self._deadline:
            raise RegionError(
                f"the region of engine {self._joining.claim.engine_id}: {reason} for "
                f"{self._joining.timeout:g} s (region_join_timeout)"
            )
