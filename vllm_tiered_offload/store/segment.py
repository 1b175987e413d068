# SPDX-License-Identifier: Apache-2.0
"""What this process knows of one segment file."""

from __future__ import annotations

import enum
from array import array

from vllm_tiered_offload.store.format import PageBlock, round_up


class State(enum.Enum):
    """Who may still write to it."""

    OWN = "own"  # this process is filling it
    OPEN = "open"  # another process is, or was when last looked at
    CLOSED = "closed"  # sealed, or left by a dead writer and read to its end


class Segment:
    """A file in a slot, and its chunks if it belongs to the present namespace.

    Chunk i is ``keys[i]``, at ``offsets[i]`` with ``checksums[i]``, in the order of the file.
    """

    __slots__ = (
        "checksums",
        "examined",
        "gone",
        "header",
        "hit_at",
        "identity",
        "keys",
        "loads",
        "offsets",
        "ordinal",
        "path",
        "root",
        "scanned_to",
        "state",
        "stride",
        "undeletable",
    )

    def __init__(self, root: int, path: str, header: PageBlock, state: State) -> None:
        self.root = root  # which of the store's roots
        self.path = path
        self.header = header
        self.state = state
        self.stride = round_up(header.chunk_bytes, header.page_bytes)
        self.ordinal = -1  # set when it enters the index
        self.identity = (0, 0)  # inode and ctime_ns when last read
        self.keys: list[bytes] = []
        self.offsets = array("Q")
        self.checksums = array("Q")
        self.scanned_to = header.page_bytes  # where the next table would be
        self.loads = 0  # chunk loads in flight; an evictor keeps away
        self.hit_at = float("-inf")  # clock of the last look-up that found something here
        self.examined = False  # hot chunks have been copied out
        self.undeletable = False
        self.gone = False

    @property
    def sequence(self) -> int:
        return self.header.sequence

    @property
    def trailer_offset(self) -> int:
        return self.header.segment_bytes - self.header.page_bytes
