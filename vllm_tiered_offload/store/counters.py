# SPDX-License-Identifier: Apache-2.0
"""What happened, by name. Counters only grow.

===================== ==========================================================
name                  counts
===================== ==========================================================
stored_chunks/_bytes  chunks written for jobs, payload bytes
loaded_chunks/_bytes  chunks read into rows with the right checksum
written_bytes         all bytes sent to the disk; read_bytes all asked of it
write_ns, read_ns     time inside the calls, nanoseconds
copied_chunks         moved to a younger segment before theirs was evicted
evicted_chunks        left the index with their segment; evicted_segments
dropped.REASON        chunks not stored on purpose: full, paused, queue, stalled,
                      read_mode, shutdown; error: not on purpose
failed.REASON         chunks looked for and not served: corrupt, deleted, io_error,
                      unknown (never held, or gone before the load); exhausted: no
                      descriptor or memory was left, the chunks are still there
write_errors          extents that were not written
io_errors.WAY.ERRNO   calls that failed, WAY is read or write
evicted_bytes         of segments removed; expired_bytes: of those, of private
                      namespaces whose process is gone
lost_segments/_chunks removed by another process, or by hand
adopted_segments      of dead writers, read without a footer
removed_leftovers     empty or unreadable files removed
damaged.PART          files skipped or scanned because of it: header, footer, unreadable
newer_segments        of a newer format version, left alone
undeletable_segments  victims that could not be removed
direct_refusals       calls that did not work with O_DIRECT
===================== ==========================================================
"""

from __future__ import annotations

import threading
from collections import Counter

from vllm_tiered_offload.store.syscalls import errno_name


class Counters:
    """A set of named counters; thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def count(self, name: str, amount: int = 1) -> None:
        """As ``add``, for names with a dot."""
        with self._lock:
            self._values[name] += amount

    def io_error(self, way: str, error: OSError) -> None:
        """A call failed; ``way`` is "read" or "write"."""
        self.count(f"io_errors.{way}.{errno_name(error)}")

    def write_error(self, error: OSError) -> None:
        """An extent, a mark or a seal was not written."""
        self.count("write_errors")
        self.io_error("write", error)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
