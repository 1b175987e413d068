# SPDX-License-Identifier: Apache-2.0
"""Jobs from submission to their one completion."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from vllm_tiered_offload.store.api import Completion


class Job:
    """One submitted store or load; counts down the chunks that are still open."""

    __slots__ = ("arrived", "bytes", "error", "failed", "is_load", "job_id", "open", "started")

    def __init__(self, job_id: int, chunks: int, started: float, *, is_load: bool) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.open = chunks
        self.started = started
        self.bytes = 0
        self.failed = 0
        self.arrived: list[bytes] = []
        self.error: str | None = None


class JobTable:
    """Jobs in flight and completions not yet taken. Thread safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._pending = 0
        self._done: deque[Completion] = deque()

    @property
    def pending(self) -> int:
        return self._pending

    def start(self, job_id: int, chunks: int, *, is_load: bool) -> Job:
        """A new job; one without chunks completes at once."""
        job = Job(job_id, chunks, self._clock(), is_load=is_load)
        with self._changed:
            self._pending += 1
            if chunks == 0:
                self._finish(job)
        return job

    def settle(self, job: Job, chunks: int, moved_bytes: int = 0) -> None:
        """``chunks`` of a store are dealt with: written, or left out on purpose."""
        with self._changed:
            job.bytes += moved_bytes
            self._count_down(job, chunks)

    def settle_loaded(self, job: Job, keys: Iterable[bytes], moved_bytes: int) -> None:
        """These chunks of a load are in their rows."""
        with self._changed:
            before = len(job.arrived)
            job.arrived.extend(keys)
            job.bytes += moved_bytes
            self._count_down(job, len(job.arrived) - before)

    def fail(self, job: Job, chunks: int, error: str) -> None:
        """``chunks`` of the job did not make it; the first error is reported."""
        with self._changed:
            job.failed += chunks
            job.error = job.error or error
            self._count_down(job, chunks)

    def take(self) -> list[Completion]:
        done: list[Completion] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Blocks until no job is in flight; False if ``timeout`` seconds were too few."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout)

    def _count_down(self, job: Job, chunks: int) -> None:
        job.open -= chunks
        if job.open == 0 and chunks:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        # A store of which a part is on the disk has done something worth counting on.
        ok = job.failed == 0 or (not job.is_load and job.bytes > 0)
        loaded = tuple(job.arrived) if job.is_load and not ok else None
        seconds = self._clock() - job.started
        self._done.append(
            Completion(job.job_id, job.is_load, ok, loaded, job.bytes, seconds, job.error)
        )
        self._pending -= 1
        if self._pending == 0:
            self._changed.notify_all()
