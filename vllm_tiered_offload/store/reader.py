# SPDX-License-Identifier: Apache-2.0
"""Loads: from places to rows.

A job's chunks are sorted by place; neighbours become one call, straight into the rows. A
chunk that fails is forgotten and reported; the others of its call are not. Where the process
has run out of descriptors or memory the chunk is reported alone: nothing is wrong with it.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from vllm_tiered_offload.store import faults
from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.descriptors import GoneError
from vllm_tiered_offload.store.direct_io import page_aligned
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.runs import LARGEST_GAP, Run, Wanted
from vllm_tiered_offload.store.segment import Segment
from vllm_tiered_offload.store.syscalls import EXHAUSTED, explain

logger = logging.getLogger("vllm.tiered_offload.store")

FAILURES_UNTIL_SICK = 8
SICK_SECONDS = 10.0
EXHAUSTED_SECONDS = 1.0  # of misses, so that what could not be loaded is not tried at once

Problem = tuple[Wanted, str, str]  # a chunk that did not arrive: reason, detail


class Reader:
    """Executes runs for one root. Thread safe; called by the pool's reader threads."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._local = threading.local()
        self._failures = 0  # in a row
        self._sick_until = float("-inf")

    def is_sick(self) -> bool:
        """Reads kept failing a moment ago; asking again soon would only cost time."""
        return self._parts.clock() < self._sick_until

    def run(self, run: Run) -> None:
        """Reads, verifies and reports; raises nothing."""
        segment, chunks = run.segment, run.chunks
        good, problems = self.fetch(segment, chunks)
        with self._parts.index.lock:
            segment.loads -= len(chunks)
        size = len(good) * segment.header.chunk_bytes
        self._parts.counters.add(loaded_chunks=len(good), loaded_bytes=size)
        if good:
            self._parts.jobs.settle_loaded(run.job, [chunk.key for chunk in good], size)
        for chunk, reason, detail in problems:
            self._parts.jobs.fail(run.job, 1, f"{chunk.key.hex()} {reason}: {detail}")

    def cancel(self, run: Run) -> None:
        """Reports a run that was not begun."""
        with self._parts.index.lock:
            run.segment.loads -= len(run.chunks)
        self._parts.jobs.fail(run.job, len(run.chunks), "the store is shutting down")

    def fetch(
        self, segment: Segment, chunks: list[Wanted]
    ) -> tuple[list[Wanted], list[Problem]]:
        """One call: what arrived with the right checksum, and what did not and is forgotten."""
        try:
            good, problems = self._load(segment, chunks)
        except Exception as error:
            good, problems = [], [(chunk, "io_error", repr(error)) for chunk in chunks]
        for chunk, reason, _ in problems:
            self._parts.counters.count(f"failed.{reason}")
            if reason != "exhausted":
                self._parts.index.discard(segment, chunk.record)
        self._note_health(bool(good), {reason for _, reason, _ in problems})
        return good, problems

    def _note_health(self, worked: bool, reasons: set[str]) -> None:
        if "exhausted" in reasons:
            until = self._parts.clock() + EXHAUSTED_SECONDS
            self._sick_until = max(self._sick_until, until)
        if worked or "io_error" not in reasons:
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= FAILURES_UNTIL_SICK:
            if not self.is_sick():
                path = self._parts.root.path
                logger.warning("%s: reads keep failing; lookups miss for a while", path)
            self._sick_until = self._parts.clock() + SICK_SECONDS

    def _load(
        self, segment: Segment, chunks: list[Wanted]
    ) -> tuple[list[Wanted], list[Problem]]:
        try:
            with self._parts.watch.operation(), self._parts.descriptors.use(segment) as fd:
                return self._load_from(fd, segment, chunks)
        except GoneError as error:
            why = f"{segment.path}: {explain(error)}"
            return [], [(chunk, "deleted", why) for chunk in chunks]
        except OSError as error:
            reason, detail = self._note_error(segment, error)
            return [], [(chunk, reason, detail) for chunk in chunks]

    def _load_from(
        self, fd: int, segment: Segment, chunks: list[Wanted]
    ) -> tuple[list[Wanted], list[Problem]]:
        try:
            end = self._read(fd, segment, chunks)
        except OSError as error:
            if len(chunks) > 1:
                return self._load_singly(fd, segment, chunks)
            return [], [(chunks[0], *self._note_error(segment, error))]
        good: list[Wanted] = []
        bad: list[Wanted] = []
        prefix = fmt.seed_prefix(segment.header.fingerprint)
        checksums, last = segment.checksums, end - segment.stride
        for chunk in chunks:
            found = fmt.payload_digest(prefix, chunk.key, chunk.payload)
            ok = chunk.offset <= last and found == checksums[chunk.record]
            (good if ok else bad).append(chunk)
        if not bad:
            return good, []
        reason = self._why(fd, segment)
        return good, [(chunk, reason, f"{segment.path} at {chunk.offset}") for chunk in bad]

    def _note_error(self, segment: Segment, error: OSError) -> tuple[str, str]:
        """The reason and the detail to report."""
        self._parts.counters.io_error("read", error)
        reason = "exhausted" if error.errno in EXHAUSTED else "io_error"
        return reason, f"{segment.path}: {explain(error)}"

    def _load_singly(
        self, fd: int, segment: Segment, chunks: list[Wanted]
    ) -> tuple[list[Wanted], list[Problem]]:
        """A bad sector fails the whole call; only its chunk shall be lost."""
        good: list[Wanted] = []
        problems: list[Problem] = []
        for chunk in chunks:
            arrived, failed = self._load_from(fd, segment, [chunk])
            good += arrived
            problems += failed
        return good, problems

    def _read(self, fd: int, segment: Segment, chunks: list[Wanted]) -> int:
        """Fills the rows; returns the file offset up to which there was data."""
        start = end = chunks[0].offset
        pad = segment.stride - segment.header.chunk_bytes
        buffers: list[memoryview] = []
        scratch = self._scratch()
        for chunk in chunks:
            if chunk.offset > end:
                buffers.append(scratch[: chunk.offset - end])
            buffers.append(chunk.payload)
            if pad:
                buffers.append(scratch[:pad])
            end = chunk.offset + segment.stride
        faults.point("reader.before_read")
        began = time.monotonic_ns()
        count = self._parts.io.read(fd, buffers, start)
        self._parts.counters.add(read_bytes=count, read_ns=time.monotonic_ns() - began)
        faults.point("reader.after_read")
        return start + count

    def _scratch(self) -> memoryview:
        """This thread's place for record pages and padding that nobody wants."""
        scratch: memoryview | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = page_aligned(LARGEST_GAP)
        return scratch

    def _why(self, fd: int, segment: Segment) -> str:
        """Wrong bytes in a file that somebody is deleting are no corruption."""
        info = os.fstat(fd)
        deleted = info.st_nlink == 0 or info.st_size < segment.header.segment_bytes
        return "deleted" if deleted else "corrupt"
