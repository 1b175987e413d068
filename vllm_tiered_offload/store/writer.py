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

from vllm_tiered_offload.store.batch import Chunk, by_piece, chunks_of, sign
from vllm_tiered_offload.store.io_pool import Piece
from vllm_tiered_offload.store.open_segment import TRIES_FOR_SPACE, OpenSegment
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.segment_log import SegmentLog
from vllm_tiered_offload.store.slots import NoRoomError
from vllm_tiered_offload.store.syscalls import NO_SPACE, explain

logger = logging.getLogger("vllm.tiered_offload.store")


class Writer:
    """One writer thread of one root; those with the lowest numbers write.

    While it writes, helpers sign the next batch and seal the segment before: the disk need
    not wait for either. ``free_one`` and ``changed`` are as ``OpenSegment`` wants them.
    """

    def __init__(
        self,
        number: int,
        parts: Parts,
        free_one: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        self._number = number
        self._parts = parts
        self._free_one = free_one
        self.open = OpenSegment(parts, free_one, changed, self._writes)
        self.turn = threading.Lock()  # held while the thread works on its segment
        self._signer = ThreadPoolExecutor(1, "vto-sign")
        self._ahead: tuple[list[Piece], Future[None]] | None = None

    def loop(self) -> None:
        """The thread: until the pool stops and its queue is empty."""
        while (batch := self._take()) is not None:
            try:
                with self.turn:
                    self._serve(batch)
            except Exception:  # the thread must outlive anything: jobs wait for it
                logger.exception("writer of %s", self._parts.root.path)
        self.open.end()
        self._signer.shutdown()

    def _take(self) -> list[Piece] | None:
        """What to do next: a copy, while there is room for it; else the next batch."""
        pool, settings = self._parts.pool, self._parts.settings
        copies = self._writes() and self.open.room() > 0
        if copies and (copy := pool.take_copy()) is not None:
            batch = [copy]
        elif self._ahead is not None:
            (batch, signed), self._ahead = self._ahead, None
            wait([signed])
        elif not self._writes():
            return None if pool.wait_stopping(settings.refresh_interval) else []
        else:
            found = pool.take_stores(
                settings.io_bytes, settings.refresh_interval, copies=copies
            )
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
                self._ahead = (batch, self._signer.submit(sign, batch, name))

    def _serve(self, batch: list[Piece]) -> None:
        if not batch:
            self.open.tend()
        elif batch[0].job is None:
            self._write_copy(batch[0])
        else:
            self._write(batch)

    def _write(self, pieces: list[Piece]) -> None:
        chunks = chunks_of(pieces)
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

    def _write_some(self, chunks: list[Chunk]) -> int:
        """Writes one extent; returns how many chunks it took. Makes room when there is none."""
        for attempt in range(TRIES_FOR_SPACE):
            log = self.open.get()
            batch = chunks[: log.room()]
            try:
                self._append(log, batch)
            except OSError as error:
                self._parts.counters.write_error(error)
                self.open.close()
                if error.errno not in NO_SPACE:
                    raise
                if attempt + 1 == TRIES_FOR_SPACE or not self._free_one():
                    raise NoRoomError(explain(error)) from error
            else:
                return len(batch)
        raise AssertionError("unreachable")

    def _append(self, log: SegmentLog, batch: list[Chunk]) -> None:
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
        parts, log = self._parts, self.open.log
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
            parts.counters.write_error(error)
            self.open.close()
        finally:
            piece.done.set()

    def _writes(self) -> bool:
        """False while the root is too small for another writer."""
        return self._number < self._parts.writers

    def _settle(self, batch: list[Chunk], *, stored: bool) -> None:
        """Tells each job how many of its chunks are dealt with."""
        size = self._parts.chunk_bytes if stored else 0
        for piece, count in by_piece(batch):
            if piece.job is not None:
                self._parts.jobs.settle(piece.job, count, count * size)

    def _leave_out(self, chunks: list[Chunk], reason: str) -> None:
        self._parts.counters.count(f"dropped.{reason}", len(chunks))
        self._settle(chunks, stored=False)

    def _fail(self, chunks: list[Chunk], error: Exception) -> None:
        why = explain(error) if isinstance(error, OSError) else repr(error)
        if not isinstance(error, OSError):
            logger.exception("store to %s", self._parts.root.path)
        self._parts.pause.begin(why)
        self._parts.counters.count("dropped.error", len(chunks))
        for piece, count in by_piece(chunks):
            if piece.job is not None:
                self._parts.jobs.fail(piece.job, count, f"{self._parts.root.path}: {why}")
