# SPDX-License-Identifier: Apache-2.0
"""How the processes of one engine come to share the memory on this host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vllm_tiered_offload.region import backing
from vllm_tiered_offload.region.file_meeting import FileMeeting
from vllm_tiered_offload.region.rendezvous import SocketsUnavailable
from vllm_tiered_offload.region.seat import Joining, Seat, logger
from vllm_tiered_offload.region.settings import RegionError
from vllm_tiered_offload.region.socket_meeting import SocketMeeting


class Meeting(Protocol):
    def take_seat(self, check: Callable[[str], None]) -> Seat:
        """A seat; `check` is called with the backing when this process is to create it."""


def open_meeting(joining: Joining) -> Meeting:
    """The way asked for, or the file where that one cannot work; and says so.

    All processes of an engine come to the same answer: it depends on the host.
    """
    if joining.claim.backing == "shm":
        return FileMeeting(joining)
    try:
        backing.probe_memfd()
        return SocketMeeting(joining)
    except (backing.MemfdUnavailable, SocketsUnavailable) as error:
        if joining.huge_bytes:
            raise RegionError(
                f"huge_pages {joining.claim.huge_pages!r} needs a memfd handed over a unix "
                f"socket: {error}; use 'auto' or 'off'"
            ) from error
        logger.warning("Region: %s; using a file in /dev/shm instead", error)
        return FileMeeting(joining)
