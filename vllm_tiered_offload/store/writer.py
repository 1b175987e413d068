# SPDX-License-Identifier: Apache-2.0
"""Stores: from rows to an extent of the open segment, then to the index.

One thread fills one segment. Small jobs that wait together share an extent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.io_pool import Piece
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.segment import Segment, State
from vllm_tiered_offload.store.segment_log import SegmentLog
from vllm_tiered_offload.store.slots import NO_SPACE, NewSegment, NoRoomError
from vllm_tiered_offload.store.syscalls import explain

logger = logging.getLogger("vllm.tiered_offload.store")

TRIES_FOR_SPACE = 3


@dataclass(slots=True)
class _Chunk:
    piece: Piece
    key: bytes
    payload: memoryview
    number: int  # within the piece


def sign(pieces: list[Piece], fingerprint: str) -> None:
    """Computes the checksums of those that have none yet."""
    prefix = fmt.seed_prefix(fingerprint)
    for piece in pieces:
        if len(piece.checksums) < len(piece.keys):
            piece.checksums = [
                fmt.payload_digest(prefix, key, payload)
                for key, payload in zip(piece.keys, piece.payloads, strict=True)
            ]


class Writer:
    """One writer thread of one root; those with the lowest numbers write.

    While it writes, two helpers sign the next batch and seal the segment before: the disk
    need not wait for either. ``free_one`` is asked for a slot when there is none; True if it
    made one.
    """

    def __init__(
        self,
        number: int,
        parts: Parts,
        free_one: Callable[[], bool],
        new_segment: Callable[[], None],
    ) -> None:
        self._number = number
        self._parts = parts
        self._free_one = free_one
        self._new_segment = new_segment
        self._log: SegmentLog | None = None
        self.turn = threading.Lock()  # held while the thread works on its segment
        self._helpers = ThreadPoolExecutor(2, "vto-helper")
        self._ahead: tuple[list[Piece], Future[None]] | None = None
        self._sealing: Future[None] | None = None

    def room(self) -> int:
        """Chunks the open segment can still take; a guess from any other thread."""
        log = self._log
        return 0 if log is None else log.room_in_all()

    def loop(self) -> None:
        """The thread: until the pool stops and its queue is empty."""
        while (batch := self._take()) is not None:
            try:
                with self.turn:
                    self._serve(batch)
            except Exception:  # the thread must outlive anything: jobs wait for it
                logger.exception("writer of %s", self._parts.root.path)
        self.close_log()
        self._helpers.shutdown()

    def _take(self) -> list[Piece] | None:
        """What to do next: a copy, while there is room for it; else the next batch."""
        pool, settings = self._parts.pool, self._parts.settings
        if (copy := pool.take_copy() if self._writes() else None) is not None:
            batch = [copy]
        elif self._ahead is not None:
            (batch, signed), self._ahead = self._ahead, None
            wait([signed])
        elif not self._writes():
            return None if pool.wait_stopping(settings.refresh_interval) else []
        else:
            found = pool.take_stores(settings.io_bytes, settings.refresh_interval)
            if not found:
                return found
            batch = found
        pool.let_loads_pass()
        return batch

    def _look_ahead(self) -> None:
        if self._ahead is None:
            batch = self._parts.pool.take_ahead(self._parts.settings.io_bytes)
            if batch:
                name = self._parts.namespace.fingerprint
                self._ahead = (batch, self._helpers.submit(sign, batch, name))

    def _serve(self, batch: list[Piece]) -> None:
        if not batch:
            self._guard("mark", self._be_idle)
        elif batch[0].job is None:
            self._write_copy(batch[0])
        else:
            self._write(batch)

    def close_log(self) -> None:
        """Seals the open segment if there is one. Only while the thread is idle or ended."""
        log, self._log = self._log, None
        if self._sealing is not None:
            wait([self._sealing])
        if log is not None:
            self._guard("seal", log.seal)

    def _close_full_log(self) -> None:
        """As ``close_log``, beside the writes to the next segment."""
        log, self._log = self._log, None
        if self._sealing is not None:
            wait([self._sealing])  # a disk that seals slower than it fills sets the pace
        if log is not None:
            self._sealing = self._helpers.submit(self._guard, "seal", log.seal)

    def _write(self, pieces: list[Piece]) -> None:
        chunks = [
            _Chunk(piece, *chunk)
            for piece in pieces
            for chunk in zip(piece.keys, piece.payloads, range(len(piece.keys)), strict=True)
        ]
        done = 0
        try:
            sign(pieces, self._parts.namespace.fingerprint)
            self._look_ahead()
            while done < len(chunks):
                done += self._write_some(chunks[done:])
            self._parts.pause.end()
        except NoRoomError as error:
            self._parts.pause.begin(str(error))
            self._leave_out(chunks[done:], "full")
        except Exception as error:
            self._fail(chunks[done:], error)
        finally:
            self._parts.forget_storing([chunk.key for chunk in chunks])
            for piece in pieces:
                self._parts.pool.finished(piece)

    def _write_some(self, chunks: list[_Chunk]) -> int:
        """Writes one extent; returns how many chunks it took. Makes room when there is none."""
        for attempt in range(TRIES_FOR_SPACE):
            log = self._open_log()
            batch = chunks[: log.room()]
            try:
                self._append(log, batch)
            except OSError as error:
                self._count_error(error)
                self.close_log()
                if error.errno not in NO_SPACE:
                    raise
                if attempt + 1 == TRIES_FOR_SPACE or not self._free_one():
                    raise NoRoomError(explain(error)) from error
            else:
                return len(batch)
        raise AssertionError("unreachable")

    def _append(self, log: SegmentLog, batch: list[_Chunk]) -> None:
        parts = self._parts
        keys = [chunk.key for chunk in batch]
        payloads = [chunk.payload for chunk in batch]
        checksums = [chunk.piece.checksums[chunk.number] for chunk in batch]
        offsets = self._write_extent(log, keys, payloads, checksums)
        parts.index.add(log.segment, keys, offsets, checksums)
        with parts.policy_lock:
            parts.policy.on_stored(len(keys))
        size = len(batch) * parts.chunk_bytes
        parts.counters.add(stored_chunks=len(batch), stored_bytes=size)
        self._settle(batch, stored=True)

    def _write_extent(
        self,
        log: SegmentLog,
        keys: list[bytes],
        payloads: list[memoryview],
        checksums: list[int],
    ) -> list[int]:
        before, began = log.end, time.monotonic_ns()
        with self._parts.watch.operation():
            offsets = log.append(keys, payloads, checksums)
        took = time.monotonic_ns() - began
        self._parts.counters.add(written_bytes=log.end - before, write_ns=took)
        return offsets

    def _write_copy(self, piece: Piece) -> None:
        """Second chance: only into room that is there, with the checksums it came with."""
        parts, log = self._parts, self._log
        try:
            room = 0 if log is None or log.is_unlinked() else log.room()
            if log is None or room == 0:
                return
            keys, checksums = list(piece.keys[:room]), list(piece.checksums[:room])
            offsets = self._write_extent(log, keys, list(piece.payloads[:room]), checksums)
            parts.index.move(log.segment, keys, offsets, checksums, piece.places[:room])
            with parts.policy_lock:
                parts.policy.on_moved(keys)
            parts.counters.add(copied_chunks=len(keys))
        except OSError as error:
            logger.debug("copy to %s: %s", parts.root.path, explain(error))
            self._count_error(error)
            self.close_log()
        finally:
            piece.done.set()

    def _open_log(self) -> SegmentLog:
        """The open segment, with room for a chunk. Raises NoRoomError or OSError."""
        log = self._log
        if log is not None and log.is_unlinked():
            self._log = None
            log.close()
        elif log is not None and log.room() > 0 and not self._is_over_the_bound(log):
            return log
        self._close_full_log()
        new = self._create()
        segment = Segment(self._parts.number, new.path, new.header, State.OWN)
        self._parts.index.register(segment)
        self._parts.made(segment)
        self._log = SegmentLog(segment, new.fd, self._parts.io)
        self._new_segment()
        return self._log

    def _create(self) -> NewSegment:
        for _ in range(TRIES_FOR_SPACE):
            try:
                return self._create_once()
            except NoRoomError:
                if not self._free_one() and not self._free_sealed():
                    raise
        return self._create_once()

    def _free_sealed(self) -> bool:
        """As ``free_one``, where only the segment before is left to go: once it is sealed."""
        sealing, self._sealing = self._sealing, None
        if sealing is None:
            return False
        wait([sealing])
        return self._free_one()

    def _create_once(self) -> NewSegment:
        parts = self._parts
        with parts.watch.operation():
            return parts.slots.create(parts.namespace, parts.chunk_bytes)

    def _be_idle(self) -> None:
        """Lets other processes read what has been written so far, and go what has to."""
        log = self._log
        if log is not None and self._is_over_the_bound(log):
            self.close_log()
            self._new_segment()  # the reclaimer shall look at it
        elif log is not None and log.needs_mark:
            with self._parts.watch.operation():
                if not log.mark():
                    self.close_log()

    def _is_over_the_bound(self, log: SegmentLog) -> bool:
        """Another process may have made it smaller."""
        root, slot = self._parts.root, log.segment.header.slot
        return slot >= root.slots or not self._writes()

    def _writes(self) -> bool:
        """False while the root is too small for another writer."""
        return self._number < self._parts.writers

    def _guard(self, what: str, action: Callable[[], object]) -> None:
        """Marks and seals are for others' and for later benefit: failing costs no job."""
        try:
            with self._parts.watch.operation():
                action()
        except OSError as error:
            self._count_error(error)
            logger.debug("%s in %s: %s", what, self._parts.root.path, explain(error))
            if what == "mark" and self._log is not None:
                self._log.close()
                self._log = None

    def _count_error(self, error: OSError) -> None:
        self._parts.counters.add(write_errors=1)
        self._parts.counters.io_error("write", error)

    def _settle(self, batch: list[_Chunk], *, stored: bool) -> None:
        """Tells each job how many of its chunks are dealt with."""
        size = self._parts.chunk_bytes if stored else 0
        for piece, count in _by_piece(batch):
            if piece.job is not None:
                self._parts.jobs.settle(piece.job, count, count * size)

    def _leave_out(self, chunks: list[_Chunk], reason: str) -> None:
        self._parts.counters.count(f"dropped.{reason}", len(chunks))
        self._settle(chunks, stored=False)

    def _fail(self, chunks: list[_Chunk], error: Exception) -> None:
        why = explain(error) if isinstance(error, OSError) else repr(error)
        if not isinstance(error, OSError):
            logger.exception("store to %s", self._parts.root.path)
        self._parts.pause.begin(why)
        self._parts.counters.count("dropped.error", len(chunks))
        for piece, count in _by_piece(chunks):
            if piece.job is not None:
                self._parts.jobs.fail(piece.job, count, f"{self._parts.root.path}: {why}")


def _by_piece(chunks: list[_Chunk]) -> list[tuple[Piece, int]]:
    """Pieces and how many of their chunks are here, in order."""
    counts: list[tuple[Piece, int]] = []
    for chunk in chunks:
        if counts and counts[-1][0] is chunk.piece:
            counts[-1] = (chunk.piece, counts[-1][1] + 1)
        else:
            counts.append((chunk.piece, 1))
    return counts
