# SPDX-License-Identifier: Apache-2.0
"""How the processes of one engine come to share the memory."""

from vllm_tiered_offload.region.seat import Joining
from vllm_tiered_offload.region.socket_meeting import SocketMeeting


def open_meeting(joining: Joining) -> SocketMeeting:
    return SocketMeeting(joining)
