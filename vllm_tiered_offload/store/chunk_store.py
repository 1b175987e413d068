# SPDX-License-Identifier: Apache-2.0
"""The facade."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm_tiered_offload.store.api import (
    Completion,
    Namespace,
    StoreEvent,
    StoreSettings,
    StoreStats,
)


class ChunkStore:
    """Chunks by key, on disk; not built yet."""

    def __init__(
        self,
        settings: StoreSettings,
        namespace: Namespace,
        memory: memoryview,
        chunk_bytes: int,
        *,
        events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    def contains(self, key: bytes) -> bool:
        raise NotImplementedError

    def submit_store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        raise NotImplementedError

    def submit_load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        raise NotImplementedError

    def take_completions(self) -> list[Completion]:
        raise NotImplementedError

    def take_events(self) -> list[StoreEvent]:
        raise NotImplementedError

    @property
    def pending_jobs(self) -> int:
        raise NotImplementedError

    def drain(self) -> None:
        raise NotImplementedError

    def switch_namespace(self, namespace: Namespace) -> None:
        raise NotImplementedError

    def stats(self) -> StoreStats:
        raise NotImplementedError

    def describe(self) -> dict[str, object]:
        raise NotImplementedError

    def shutdown(self, timeout: float = 5.0) -> bool:
        raise NotImplementedError
