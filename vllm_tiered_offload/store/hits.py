# SPDX-License-Identifier: Apache-2.0
"""Hits on their way from look-ups, which can afford one append, to the eviction policies."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from vllm_tiered_offload.store.index import RECORD_BITS, Index
from vllm_tiered_offload.store.parts import Parts

MOST_HITS = 1 << 18  # remembered between two looks


class Hits:
    """Keys found since recency was last looked at. Thread safe."""

    def __init__(self, index: Index, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self._draining = threading.Lock()
        self._found: deque[bytes] = deque(maxlen=MOST_HITS)
        self.note = self._found.append
        self.note_all = self._found.extend
        self.clear = self._found.clear

    def drain(self, roots: Sequence[Parts]) -> None:
        """Tells the policies, and marks the segments: their loads may be on the way.

        Afterwards that is done for every hit there was, whichever thread did it.
        """
        with self._draining:
            self._drain(roots)

    def _drain(self, roots: Sequence[Parts]) -> None:
        distinct: set[bytes] = set()  # a request that waits is looked up again and again
        with contextlib.suppress(IndexError):  # another thread emptied it
            for _ in range(len(self._found)):
                distinct.add(self._found.popleft())
        now, index = self._clock(), self._index
        for key in distinct:
            segment = index.segments.get(index.places.get(key, -1) >> RECORD_BITS)
            if segment is not None:
                segment.hit_at = now
                parts = roots[segment.root]
                with parts.policy_lock:
                    parts.policy.on_hit(key)
