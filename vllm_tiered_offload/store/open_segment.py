# SPDX-License-Identifier: Apache-2.0
"""The segment that a writer fills: made when one is needed, sealed beside the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.segment import Segment, State
from vllm_tiered_offload.store.segment_log import SegmentLog
from vllm_tiered_offload.store.slots import NewSegment, NoRoomError
from vllm_tiered_offload.store.syscalls import explain

logger = logging.getLogger("vllm.tiered_offload.store")

TRIES_FOR_SPACE = 3


class OpenSegment:
    """One writer's. ``log`` is None while there is none.

    Args:
        free_one: makes a slot free where there is none; True if it did.
        changed: told when a slot was taken, or a segment closed that has to go.
        is_wanted: whether the writer is to have a segment at all.
    """

    def __init__(
        self,
        parts: Parts,
        free_one: Callable[[], bool],
        changed: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._free_one = free_one
        self._changed = changed
        self._is_wanted = is_wanted
        self.log: SegmentLog | None = None
        self._sealer = ThreadPoolExecutor(1, "vto-seal")
        self._sealing: Future[None] | None = None

    def room(self) -> int:
        """Chunks it can still take; a guess from any other thread."""
        log = self.log
        return 0 if log is None else log.room_in_all()

    def get(self) -> SegmentLog:
        """One with room for a chunk. Raises NoRoomError or OSError."""
        log = self.log
        if log is not None and log.is_unlinked():
            self.log = None
            log.close()
        elif log is not None and log.room() > 0 and not self._is_over_the_bound(log):
            return log
        self._close_beside()
        new = self._create()
        segment = Segment(self._parts.number, new.path, new.header, State.OWN)
        self._parts.index.register(segment)
        # Before its slot counts as taken: who then looks for room for copies has to find it.
        log = self.log = SegmentLog(segment, new.fd, self._parts.io)
        self._parts.made(segment)
        self._changed()
        return log

    def tend(self) -> None:
        """Lets other processes read what has been written so far, and go what has to."""
        log = self.log
        if log is None:
            return
        if self._is_over_the_bound(log):
            self.close()
            self._changed()
        elif log.needs_mark:
            self._mark(log)

    def close(self) -> None:
        """Seals it, and waits for that."""
        log, self.log = self.log, None
        if self._sealing is not None:
            wait([self._sealing])
        if log is not None:
            self._seal(log)

    def end(self) -> None:
        """As ``close``, for good."""
        self.close()
        self._sealer.shutdown()

    def _close_beside(self) -> None:
        """As ``close``, beside the writes to the next segment."""
        log, self.log = self.log, None
        if self._sealing is not None:
            wait([self._sealing])  # a disk that seals slower than it fills sets the pace
        if log is not None:
            self._sealing = self._sealer.submit(self._seal, log)

    def _create(self) -> NewSegment:
        # Another writer may be quicker to take what was freed.
        for _ in range(TRIES_FOR_SPACE * self._parts.threads):
            try:
                return self._create_once()
            except NoRoomError:
                if not self._free_one() and not self._free_sealed():
                    raise
        return self._create_once()

    def _create_once(self) -> NewSegment:
        parts = self._parts
        with parts.watch.operation():
            return parts.slots.create(parts.namespace, parts.chunk_bytes)

    def _free_sealed(self) -> bool:
        """As ``free_one``, where only the segment before is left to go: once it is sealed."""
        sealing, self._sealing = self._sealing, None
        if sealing is None:
            return False
        wait([sealing])
        return self._free_one()

    def _is_over_the_bound(self, log: SegmentLog) -> bool:
        """Another process may have made it smaller."""
        return log.segment.header.slot >= self._parts.root.slots or not self._is_wanted()

    # Marks and seals are for others' and for later benefit: failing costs no job.

    def _mark(self, log: SegmentLog) -> None:
        try:
            with self._parts.watch.operation():
                marked = log.mark()
        except OSError as error:
            self._note_failure("mark", error)
            self.log = None
            log.close()
            return
        if not marked:  # no room: only sealing makes it readable
            self.close()

    def _seal(self, log: SegmentLog) -> None:
        try:
            with self._parts.watch.operation():
                log.seal()
        except OSError as error:
            self._note_failure("seal", error)

    def _note_failure(self, what: str, error: OSError) -> None:
        self._parts.counters.write_error(error)
        logger.debug("%s in %s: %s", what, self._parts.root.path, explain(error))
