# SPDX-License-Identifier: Apache-2.0
"""One root in one process: its parts put together, its threads started and stopped."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_tiered_offload.store import locks, namespaces
from vllm_tiered_offload.store.api import Namespace, RootStats, StoreError, StoreSettings
from vllm_tiered_offload.store.opening import Shared, file_system_of, open_parts
from vllm_tiered_offload.store.reader import Reader
from vllm_tiered_offload.store.reclaimer import Reclaimer
from vllm_tiered_offload.store.refresher import Refresher
from vllm_tiered_offload.store.syscalls import explain
from vllm_tiered_offload.store.writer import Writer

logger = logging.getLogger("vllm.tiered_offload.store")

LONGEST_REFRESH_BACKOFF = 30.0


class Disk:
    """A root, ready to use once constructed. Raises StoreError in one line."""

    def __init__(
        self,
        number: int,
        path: Path,
        settings: StoreSettings,
        namespace: Namespace,
        row: memoryview,
        *,
        shared: Shared,
    ) -> None:
        self.parts, self.direct_because = open_parts(
            number, path, settings, namespace, row, shared=shared
        )
        self.read_only_because = self.parts.root.read_only_because
        self.stalled = False
        self._namespace_lock: int | None = None
        self._refresher = Refresher(self.parts)
        self.reader = Reader(self.parts)
        self._reclaimer = Reclaimer(self.parts, self.reader.fetch, self._room)
        self._writers = [
            Writer(n, self.parts, self._reclaimer.free_one, self._reclaimer.wake)
            for n in range(self.parts.threads if self.writable else 0)
        ]
        self.recovered_chunks, self.recovery_seconds = 0, 0.0
        self._free_bytes, self._free_inodes = 0, 0
        try:
            self._recover()
        except BaseException:
            self._leave_namespace()
            raise
        self._start()

    @property
    def writable(self) -> bool:
        return self.read_only_because is None

    def refuses_stores(self) -> str | None:
        """Why a store would be dropped here at this moment; None if it is welcome."""
        if not self.writable:
            return "read_mode"
        if self.stalled:
            return "stalled"
        if self.parts.pause.active:
            return "paused"
        return None

    def notice_stall(self, timeout: float) -> None:
        """Compares the oldest call with ``timeout`` seconds; says so when it changes."""
        age = self.parts.watch.oldest_age()
        if (age > timeout) != self.stalled:
            self.stalled = age > timeout
            how = (
                f"a call hangs for {age:.1f} s, lookups miss" if self.stalled else "moves again"
            )
            logger.warning("%s: %s", self.parts.root.path, how)

    @property
    def unavailable(self) -> bool:
        """Whether lookups should miss: a call hangs, or reading keeps failing."""
        return self.stalled or self.reader.is_sick()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While it lasts, no thread of the root touches index or files of its own accord."""
        with contextlib.ExitStack() as held:
            # In the order in which the threads themselves take them.
            held.enter_context(self._reclaimer.turn)
            held.enter_context(self._refresher.turn)
            for writer in self._writers:
                held.enter_context(writer.turn)
            yield

    def switch_namespace(self, namespace: Namespace) -> None:
        """Goes on in another namespace: within ``quiet``, without jobs, the index empty."""
        for writer in self._writers:
            writer.open.close()
        self.parts.descriptors.close()
        self._leave_namespace()
        self.parts.namespace = namespace
        self._recover()

    def shutdown(self, deadline: float) -> bool:
        """Ends the threads; True if all ended by ``deadline`` (time.monotonic())."""
        pool = self.parts.pool
        pool.stop()
        self._reclaimer.wake()
        ended = pool.join(deadline)
        if ended:
            self._leave_namespace()
            self.parts.descriptors.close()
        return ended

    def describe(self) -> dict[str, object]:
        """Facts for the start-up line."""
        parts = self.parts
        geometry = parts.root.geometry
        return {
            "path": parts.root.path,
            "file_system": file_system_of(parts.root.path),
            "mode": "read_write" if self.writable else "read",
            "read_only_because": self.read_only_because,
            "direct_io": parts.io.last_write_mode if self.writable else parts.io.last_read_mode,
            "buffered_because": self.direct_because,
            "page_bytes": geometry.page_bytes,
            "segment_bytes": geometry.segment_bytes,
            "slots": parts.root.slots,
            "writers": parts.writers if self.writable else 0,
            "max_bytes": geometry.max_bytes,
            "min_free_bytes": parts.root.min_free_bytes,
            "recovered_chunks": self.recovered_chunks,
            "recovery_seconds": self.recovery_seconds,
        }

    def stats(self, chunks: int) -> RootStats:
        parts = self.parts
        own = parts.counters.snapshot()
        own["direct_refusals"] = parts.io.refusals
        return RootStats(
            path=parts.root.path,
            healthy=not self.stalled and parts.pause.reason is None,
            stalled=self.stalled,
            paused=parts.pause.reason,
            direct_read=parts.io.last_read_mode,
            direct_write=parts.io.last_write_mode,
            oldest_seconds=parts.watch.oldest_age(),
            slots=parts.root.slots,
            used_slots=len(parts.catalogue),
            segment_bytes=parts.root.geometry.segment_bytes,
            max_bytes=parts.root.geometry.max_bytes,
            resident_bytes=len(parts.catalogue) * parts.root.geometry.segment_bytes,
            free_bytes=self._free_bytes,
            free_inodes=self._free_inodes,
            chunks=chunks,
            recovered_chunks=self.recovered_chunks,
            recovery_seconds=self.recovery_seconds,
            queued_store_bytes=parts.pool.queued_store_bytes,
            queued_loads=parts.pool.queued_loads,
            counters=own,
        )

    def _room(self) -> int:
        return max((writer.open.room() for writer in self._writers), default=0)

    def _recover(self) -> None:
        began = time.monotonic()
        parts = self.parts
        try:
            if self.writable:
                self._namespace_lock = namespaces.enter(parts.root, parts.namespace)
            self._refresher.recover()
            if self.writable:
                self._reclaimer.trim()
                used = {segment.header.fingerprint for segment in parts.catalogue.all()}
                namespaces.remove_dead(parts.root, used)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"root_dir {parts.root.path}: {explain(error)}") from error
        self._look_at_free_space()
        segments = parts.catalogue.all()
        self.recovered_chunks = sum(len(segment.keys) for segment in segments)
        self.recovery_seconds = time.monotonic() - began

    def _look_at_free_space(self) -> None:
        """For the statistics, which must not wait for a disk."""
        parts = self.parts
        with contextlib.suppress(OSError), parts.watch.operation():
            self._free_bytes = parts.syscalls.free_bytes(parts.root.path)
            self._free_inodes = parts.syscalls.free_inodes(parts.root.path)

    def _leave_namespace(self) -> None:
        fd, self._namespace_lock = self._namespace_lock, None
        if fd is not None:
            locks.close(fd)

    def _start(self) -> None:
        loops: list[tuple[str, Callable[[], None]]] = [("refresh", self._refresh_loop)]
        loops += [
            (f"read-{n}", self._read_loop) for n in range(self.parts.settings.read_threads)
        ]
        loops += [(f"write-{n}", writer.loop) for n, writer in enumerate(self._writers)]
        if self.writable:
            loops.append(("reclaim", self._reclaimer.loop))
        self.parts.pool.start(loops)

    def _read_loop(self) -> None:
        while (run := self.parts.pool.take_load()) is not None:
            self.reader.run(run)

    def _refresh_loop(self) -> None:
        """Every interval; less often while the directory cannot be read."""
        pause = interval = self.parts.settings.refresh_interval
        while not self.parts.pool.wait_stopping(pause):
            try:
                if self._refresher.refresh() and self.writable:
                    self._reclaimer.wake()
                self._look_at_free_space()
                self.parts.drain_hits()
                pause = interval
            except OSError as error:
                if pause == interval:
                    logger.warning("%s: %s", self.parts.root.path, explain(error))
                pause = min(2 * pause, max(interval, LONGEST_REFRESH_BACKOFF))
            except Exception:
                logger.exception("refresh of %s", self.parts.root.path)
