# SPDX-License-Identifier: Apache-2.0
"""Meeting over a unix socket: the first worker makes the memory, the others are given it."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from vllm_tiered_offload.region.claim import name_of
from vllm_tiered_offload.region.forks import PrivateFd
from vllm_tiered_offload.region.handover import HandOver
from vllm_tiered_offload.region.rendezvous import find_place
from vllm_tiered_offload.region.roster import name_ranks
from vllm_tiered_offload.region.seat import Awaited, CreatorDied, Joining, Seat, logger
from vllm_tiered_offload.region.settings import RegionError
from vllm_tiered_offload.region.wire import Peer, receive, send

# Seconds to hope that a dying engine with the same id ends, before giving up.
REFUSAL_PATIENCE = 10.0
# Seconds the scheduler waits for workers; vLLM starts it when they are done.
SCHEDULER_PATIENCE = 30.0
_POLL = 0.1


class CreatorSeat(Seat):
    """Of the worker that made the memory; serves it to the others."""

    created = True

    def __init__(self, joining: Joining, handover: HandOver, fd: PrivateFd) -> None:
        assert joining.rank is not None
        self._joining = joining
        self._rank = joining.rank
        self._handover = handover
        self._fd = fd
        self.ranks = {}
        handover.roster.enter(self._rank, os.getpid(), joining.facts)

    def fileno(self) -> int:
        return self._fd.fileno()

    def mapped(self) -> None:
        self._handover.mark_mapped(self._rank)

    def wait_for_all(self, deadline: float) -> None:
        joining, roster = self._joining, self._handover.roster
        awaited = Awaited(joining.claim.engine_id, joining.clock)
        while not roster.wait_until_complete(1.0):
            missing = roster.missing()
            awaited.tell(missing)
            if joining.clock() >= deadline and missing:
                raise _late(joining, missing)
        self.ranks = roster.facts()

    def close(self, reason: str = "") -> None:
        self._handover.close(reason)


def _late(joining: Joining, missing: list[int]) -> RegionError:
    return RegionError(
        f"{name_ranks(missing)} of {joining.claim.world_size} did not join the region of "
        f"engine {joining.claim.engine_id} on this host within {joining.timeout:.0f} s "
        "(region_join_timeout)"
    )


class JoinerSeat(Seat):
    """Of a worker or the scheduler that was given the memory."""

    def __init__(
        self, joining: Joining, sock: socket.socket, fd: int, welcome: dict[str, Any]
    ) -> None:
        self._joining = joining
        self._sock = sock
        self._fd = PrivateFd(fd)
        self.ranks = _ranks(welcome.get("ranks"))

    def fileno(self) -> int:
        return self._fd.fileno()

    def mapped(self) -> None:
        self._fd.close()
        try:
            send(self._sock, {"mapped": True})
        except OSError as error:
            raise CreatorDied from error

    def wait_for_all(self, deadline: float) -> None:
        clock = self._joining.clock
        self._sock.settimeout(max(deadline - clock(), 0.001))
        try:
            message, _ = receive(self._sock)
        except TimeoutError:
            raise RegionError(
                f"the workers of engine {self._joining.claim.engine_id} did not all join the "
                f"region within {self._joining.timeout:.0f} s (region_join_timeout)"
            ) from None
        except (EOFError, OSError) as error:
            raise CreatorDied from error
        if "refused" in message:
            raise RegionError(f"the region was given up: {message['refused']}")
        self.ranks = _ranks(message.get("ranks"))

    def close(self, reason: str = "") -> None:
        self._fd.close()
        self._sock.close()


def _ranks(message: object) -> dict[int, dict[str, Any]]:
    if not isinstance(message, dict):
        return {}
    return {int(rank): dict(facts) for rank, facts in message.items()}


class SocketMeeting:
    """Chooses the creator and takes a seat; one object an attempt to join."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining
        self._place = find_place(name_of(joining.claim.engine_id))
        self._deadline = joining.clock() + joining.timeout
        self._patience_ends: float | None = None

    @property
    def shown(self) -> str:
        return self._place.shown

    def take_seat(self, make: Callable[[], PrivateFd]) -> Seat:
        """A seat at the region; `make` is called when this process is to create it.

        Raises `RegionError`: refused, too late, or what `make` raises.
        """
        while True:
            sock, listener = self._meet()
            if listener is not None:
                return self._create(listener, make)
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
                    self._be_patient(
                        SCHEDULER_PATIENCE, "no worker has joined it", kind="empty"
                    )
                    return None, None
                self._place.remove_leftover()
                return None, self._place.listen()
            except OSError as error:
                # EADDRINUSE: another process was faster. EAGAIN: its queue is full.
                if error.errno not in (errno.EADDRINUSE, errno.EAGAIN, errno.ECONNRESET):
                    raise
                self._check_deadline(f"{self._place.shown}: {error.strerror}")
                return None, None

    def _create(self, listener: socket.socket, make: Callable[[], PrivateFd]) -> Seat:
        try:
            fd = make()
        except BaseException:
            with self._place.locked():
                self._place.remove_leftover()
                listener.close()
            raise
        joining = self._joining
        handover = HandOver(joining.claim, self._place, listener, fd, joining.scheduler_joins)
        return CreatorSeat(joining, handover, fd)

    def _ask(self, sock: socket.socket) -> Seat | None:
        """A seat if the creator gives one; None when asking again makes sense."""
        try:
            answer, fd = self._exchange(sock)
        except (EOFError, OSError):
            sock.close()  # it died, or finished with another engine of this id
            self._check_deadline("the process that makes the region does not answer")
            return None
        if fd is not None and answer.get("ok"):
            objection = Peer.of(sock).objection(answer.get("pid"))
            if not objection:
                return JoinerSeat(self._joining, sock, fd, answer)
            answer = {"refused": objection, "kind": "stranger"}
        if fd is not None:
            os.close(fd)
        sock.close()
        self._consider(answer)
        return None

    def _exchange(self, sock: socket.socket) -> tuple[dict[str, Any], int | None]:
        joining = self._joining
        remaining = max(self._deadline - joining.clock(), 0.001)
        sock.settimeout(remaining)
        hello = {
            "pid": os.getpid(),
            "rank": joining.rank,
            "token": joining.claim.token,
            "claim": joining.claim.to_json(),
            "facts": joining.facts,
            "partial": self._out_of_patience(),
        }
        send(sock, hello)
        return receive(sock)

    def _consider(self, answer: dict[str, Any]) -> None:
        """Return when to ask again later, else raise."""
        if "waiting" in answer:
            self._be_patient(SCHEDULER_PATIENCE, "", kind="partial")
            return
        reason = str(answer.get("refused", "the answer makes no sense"))
        if answer.get("kind") in ("duplicate", "mismatch"):
            self._be_patient(REFUSAL_PATIENCE, reason, kind="refused")
            return
        raise RegionError(f"{self._place.shown}: {reason}")

    def _out_of_patience(self) -> bool:
        return self._patience_ends is not None and self._joining.clock() >= self._patience_ends

    def _be_patient(self, seconds: float, reason: str, kind: str) -> None:
        now = self._joining.clock()
        if self._patience_ends is None:
            self._patience_ends = now + min(seconds, self._joining.timeout)
            if reason:
                logger.info("Region: %s; trying for %.0f s more", reason, seconds)
        if now < self._patience_ends or kind == "partial":
            return  # a partial region is handed over at the next attempt
        claim = self._joining.claim
        raise RegionError(
            f"the region of engine {claim.engine_id} cannot be joined by {self._joining.who}: "
            f"{reason}"
        )

    def _check_deadline(self, reason: str) -> None:
        if self._joining.clock() >= self._deadline:
            raise RegionError(
                f"the region of engine {self._joining.claim.engine_id}: {reason} within "
                f"{self._joining.timeout:.0f} s (region_join_timeout)"
            )
