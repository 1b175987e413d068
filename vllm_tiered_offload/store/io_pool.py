# SPDX-License-Identifier: Apache-2.0
"""The threads of one root and what they wait for.

Loads are never dropped and go first: a writer takes its next batch only when no load waits
for a thread, or after a short patience. Stores are bounded in bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from vllm_tiered_offload.store.jobs import Job
from vllm_tiered_offload.store.runs import Run

logger = logging.getLogger("vllm.tiered_offload.store")

PATIENCE_WITH_LOADS = 0.05  # seconds a batch of stores lets waiting loads pass


class Piece:
    """Chunks that belong together in a store, in prefix order; at most one extent.

    A copy has checksums, and no job: it is written only where it fits at once.
    """

    __slots__ = ("bytes", "checksums", "done", "job", "keys", "payloads", "places")

    def __init__(
        self,
        job: Job | None,
        keys: Sequence[bytes],
        payloads: Sequence[memoryview],
        checksums: Sequence[int] = (),
        places: Sequence[int] = (),
    ) -> None:
        self.job = job
        self.keys = keys
        self.payloads = payloads
        self.checksums = checksums  # of a store: once they are computed
        self.places = places  # where the chunks of a copy were
        self.bytes = sum(map(len, payloads))
        self.done = threading.Event()  # a copy was written or was not to be


class IoPool:
    """Queues and threads of one root."""

    def __init__(self, name: str, store_queue_bytes: int) -> None:
        self._name = name
        self._most_store_bytes = store_queue_bytes
        self._lock = threading.Lock()
        # One for each kind of sleeper: waking all for everything costs the caller more than
        # the rest of a submission.
        self._load_waits = threading.Condition(self._lock)
        self._store_waits = threading.Condition(self._lock)
        self._loads_passed = threading.Condition(self._lock)
        self._stop_asked = threading.Event()
        self._loads: deque[Run] = deque()
        self._stores: deque[Piece] = deque()
        self._copies: deque[Piece] = deque()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self.queued_store_bytes = 0  # until they are written

    @property
    def queued_loads(self) -> int:
        return len(self._loads)

    def start(self, loops: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Starts one thread for each named loop; each must end once the pool is stopping."""
        for label, loop in loops:
            # Daemons: a thread that hangs in the kernel must not keep the process from exiting.
            thread = threading.Thread(target=loop, name=f"{self._name}-{label}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def put_loads(self, runs: Sequence[Run]) -> bool:
        """Queues loads; False when the pool is stopping."""
        with self._lock:
            if self._stopping:
                return False
            self._loads.extend(runs)
            self._load_waits.notify(len(runs))
            return True

    def room_for_stores(self) -> int:
        """Bytes the store queue still takes."""
        return max(0, self._most_store_bytes - self.queued_store_bytes)

    def put_store(self, piece: Piece) -> bool:
        """Queues a store; False when the pool is stopping."""
        with self._lock:
            if self._stopping:
                return False
            self._stores.append(piece)
            self.queued_store_bytes += piece.bytes
            self._store_waits.notify()
            return True

    def put_copy(self, piece: Piece) -> None:
        """Queues a copy, before all stores: it must be written while there is room."""
        with self._lock:
            self._copies.append(piece)
            self._store_waits.notify_all()  # not each of them takes copies

    def withdraw_copy(self, piece: Piece) -> bool:
        """Takes a copy back. False when a writer has it already."""
        with self._lock:
            if piece not in self._copies:
                return False
            self._copies.remove(piece)
            return True

    def take_load(self) -> Run | None:
        """The next load, however long it takes; None once the pool is stopping and empty."""
        with self._lock:
            self._load_waits.wait_for(lambda: self._loads or self._stopping)
            if not self._loads:
                return None
            run = self._loads.popleft()
            if not self._loads:
                self._loads_passed.notify_all()
            return run

    def let_loads_pass(self) -> None:
        """Waits until no load waits for a thread, but not for long."""
        with self._lock:
            if self._loads and not self._stopping:
                self._loads_passed.wait_for(lambda: not self._loads, PATIENCE_WITH_LOADS)

    def take_stores(
        self, most_bytes: int, timeout: float, *, copies: bool = True
    ) -> list[Piece] | None:
        """The next batch: one copy if wanted, or stores that fit together in ``most_bytes``.

        [] after ``timeout`` seconds without any; None once the pool is stopping and empty.
        """
        with self._lock:
            self._store_waits.wait_for(
                lambda: self._stores or self._stopping or (copies and self._copies), timeout
            )
            if copies and self._copies:
                return [self._copies.popleft()]
            batch = self._next_batch(most_bytes)
            return None if self._stopping and not batch else batch

    def take_copy(self) -> Piece | None:
        """A copy, if one waits."""
        with self._lock:
            return self._copies.popleft() if self._copies else None

    def take_ahead(self, most_bytes: int) -> list[Piece]:
        """The batch after the one in hand, if it waits already: stores only, for a copy must
        stay where it can be withdrawn."""
        with self._lock:
            return self._next_batch(most_bytes)

    def _next_batch(self, most_bytes: int) -> list[Piece]:
        batch: list[Piece] = []
        while self._stores and (not batch or self._stores[0].bytes <= most_bytes):
            batch.append(self._stores.popleft())
            most_bytes -= batch[-1].bytes
        return batch

    def finished(self, piece: Piece) -> None:
        """The rows of a store are free again."""
        with self._lock:
            self.queued_store_bytes -= piece.bytes

    def stop(self) -> None:
        """No new stores; threads end when their queues are empty."""
        with self._lock:
            self._stopping = True
            self._stop_asked.set()
            for sleepers in (self._load_waits, self._store_waits, self._loads_passed):
                sleepers.notify_all()

    def abandon_queues(self) -> tuple[list[Run], list[Piece]]:
        """Empties the queues; what the threads hold already is not touched."""
        with self._lock:
            loads, stores = list(self._loads), list(self._stores)
            copies = list(self._copies)
            self._loads.clear()
            self._stores.clear()
            self._copies.clear()
        for copy in copies:
            copy.done.set()
        return loads, stores

    @property
    def stopping(self) -> bool:
        return self._stopping

    def wait_stopping(self, timeout: float) -> bool:
        """Sleeps, unless the pool stops meanwhile; True if it does."""
        return self._stop_asked.wait(timeout)

    def join(self, deadline: float) -> bool:
        """Waits for the threads until time.monotonic() is ``deadline``; True if all ended."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
