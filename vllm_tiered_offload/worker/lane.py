# SPDX-License-Identifier: Apache-2.0
"""A FIFO of jobs on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Lane:
    """Runs jobs one after another in the order of `submit`, until `close`.

    A job must not raise: whoever submits wraps it. The thread is a daemon so that
    an engine that dies without `close` can end.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what was submitted, then end the thread; may be called twice."""
        self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
