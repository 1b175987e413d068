# SPDX-License-Identifier: Apache-2.0
"""The tier without an engine: vLLM's configuration by hand, jobs, and a store in memory."""

from __future__ import annotations

import dataclasses
import mmap
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload import config as vllm_config
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vllm_tiered_offload.store import (
    Completion,
    Namespace,
    RootStats,
    StoreEvent,
    StoreSettings,
    StoreStats,
)

PAGE = mmap.PAGESIZE


def _make(cls: type, **fields: Any) -> Any:
    """`cls` from those fields that this vLLM has."""
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in fields.items() if name in known})


def make_config(
    tiers: Sequence[Mapping[str, Any]] = (),
    *,
    chunks: int = 16,
    page: int = PAGE,
    world_size: int = 1,
    rank: int = 0,
    events: bool = False,
    engine_id: str | None = None,
    **extra: Any,
) -> Any:
    """vLLM's OffloadingConfig; one KV group, one block a chunk."""
    group = _make(
        vllm_config.OffloadingGroupConfig,
        tokens_per_block=16,
        layer_names=("layer.0",),
        group_id=0,
    )
    return _make(
        vllm_config.OffloadingConfig,
        groups=(group,),
        worker_kv_bytes_per_block=page,
        enable_kv_cache_events=events,
        extra_config={
            "cpu_bytes_to_use": page * world_size * chunks,
            "secondary_tiers": [dict(tier) for tier in tiers],
            **extra,
        },
        engine_id=engine_id or str(uuid.uuid4()),
        model=_make(
            vllm_config.OffloadingModelConfig,
            name="model",
            dtype="bfloat16",
            max_model_len=4096,
        ),
        cache=vllm_config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=_make(
            vllm_config.OffloadingParallelConfig,
            rank=rank,
            world_size=world_size,
            tp_size=world_size,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


def make_spec(config: Any | None = None, **attributes: Any) -> Any:
    """What a tier reads of an OffloadingSpec."""
    config = config or make_config()
    return SimpleNamespace(
        config=config,
        extra_config=config.extra_config,
        kv_events_config=OffloadingKVEventsConfig(config.enable_kv_cache_events, False),
        blocks_per_chunk=1,
        replicated_layout=False,
        cpu_page_size_per_worker=config.worker_kv_bytes_per_block,
        **attributes,
    )


def page_aligned(size: int) -> memoryview:
    """`size` writable bytes that start a page."""
    return memoryview(mmap.mmap(-1, size))[:size]


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), group)


def request(name: str = "r", positions: Mapping[bytes, int] | None = None) -> ReqContext:
    """A request; `positions` are the end tokens of its keys, where this vLLM tells them."""
    context = ReqContext(req_id=name)
    if hasattr(context, "set_offload_key_position"):
        for at, position in (positions or {}).items():
            context.set_offload_key_position(at, position)
    return context


def announce(tier: SecondaryTierManager, context: ReqContext, keys: Iterable[bytes]) -> None:
    """A new request with `keys` in prompt order, as each vLLM's scheduler announces it."""
    tier.on_new_request(context)
    if not hasattr(context, "set_offload_key_position"):
        tier.touch(list(keys), context)


def assert_moved(result: JobResult, size: int) -> None:
    """The job moved so many bytes, where this vLLM's results say so (0.31 on)."""
    assert getattr(result, "transfer_bytes", size) == size


def job(
    job_id: int,
    keys: Collection[bytes],
    rows: Sequence[int],
    *,
    load: bool = False,
    context: ReqContext | None = None,
) -> TransferJob:
    chunk_ids = np.array(rows, dtype=np.int32)
    return TransferJob(job_id, keys, chunk_ids, load, context or request())


def finished(
    tier: SecondaryTierManager, count: int, seconds: float = 20.0
) -> dict[int, JobResult]:
    """The next `count` results by job; fails on a job reported twice."""
    results: dict[int, JobResult] = {}
    deadline = time.monotonic() + seconds
    while len(results) < count:
        for result in tier.get_finished_jobs():
            assert result.job_id not in results, f"job {result.job_id} reported twice"
            results[result.job_id] = result
        assert time.monotonic() < deadline, f"{len(results)} of {count} jobs ended"
        time.sleep(0.001)
    return results


class MemoryStore:
    """The store's interface over a dictionary; jobs end when `run` is called or at once."""

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
        self.settings, self.namespaces = settings, [namespace]
        self.chunk_bytes, self.events_enabled = chunk_bytes, events
        self.held: dict[bytes, bytes] = {}
        self.jobs: list[tuple[int, bool, list[bytes], list[int]]] = []
        self.lost: set[bytes] = set()
        self.refuse: Exception | None = None
        self.ends_in_time = True
        self.drained = 0
        self.fields: dict[str, Any] = {}
        self.root_fields: dict[str, Any] = {}
        self._memory = memory
        self._completions: list[Completion] = []
        self._events: list[StoreEvent] = []

    def contains(self, key: bytes) -> bool:
        return key in self.held

    def submit_store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        self._submit(job_id, False, keys, rows)

    def submit_load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        self._submit(job_id, True, keys, rows)

    def _submit(
        self, job_id: int, is_load: bool, keys: Sequence[bytes], rows: Sequence[int]
    ) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.jobs.append((job_id, is_load, list(keys), list(rows)))

    def run(self) -> None:
        """End every submitted job."""
        for job_id, is_load, keys, rows in self.jobs:
            (self._load if is_load else self._store)(job_id, keys, rows)
        self.jobs.clear()

    def _row(self, row: int) -> slice:
        return slice(row * self.chunk_bytes, (row + 1) * self.chunk_bytes)

    def _store(self, job_id: int, keys: list[bytes], rows: list[int]) -> None:
        for at, row in zip(keys, rows, strict=True):
            self.held[at] = bytes(self._memory[self._row(row)])
        size = len(keys) * self.chunk_bytes
        self.complete(Completion(job_id, False, True, None, size, 0.5, None))
        self._events.append(StoreEvent(False, tuple(keys)))

    def _load(self, job_id: int, keys: list[bytes], rows: list[int]) -> None:
        good = [at for at in keys if at in self.held and at not in self.lost]
        for at, row in zip(keys, rows, strict=True):
            if at in good:
                self._memory[self._row(row)] = self.held[at]
        for at in self.lost:
            self.held.pop(at, None)
        ok = len(good) == len(keys)
        loaded = None if ok else tuple(good)
        error = None if ok else "/root/segments/000000.seg: EIO"
        size = len(good) * self.chunk_bytes
        self.complete(Completion(job_id, True, ok, loaded, size, 0.25, error))

    def complete(self, completion: Completion) -> None:
        self._completions.append(completion)

    def evict(self, *keys: bytes) -> None:
        for at in keys:
            del self.held[at]
        self._events.append(StoreEvent(True, keys))

    def take_completions(self) -> list[Completion]:
        taken, self._completions = self._completions, []
        return taken

    def take_events(self) -> list[StoreEvent]:
        taken, self._events = self._events, []
        return taken

    @property
    def pending_jobs(self) -> int:
        return len(self.jobs)

    def drain(self) -> None:
        self.drained += 1
        self.run()

    def switch_namespace(self, namespace: Namespace) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.namespaces.append(namespace)
        self.held.clear()

    def stats(self) -> StoreStats:
        root = _filled(RootStats, {"path": str(self.settings.root_dirs[0]), "paused": None})
        root = dataclasses.replace(root, **self.root_fields)
        stats = _filled(StoreStats, {"roots": (root,), "chunks": len(self.held)})
        return dataclasses.replace(stats, **self.fields)

    def describe(self) -> dict[str, object]:
        return {"chunk_bytes": self.chunk_bytes, "io_bytes": 1 << 24, "roots": []}

    def shutdown(self, timeout: float = 5.0) -> bool:
        return self.ends_in_time


def _filled(cls: type, given: dict[str, Any]) -> Any:
    """`cls` with zeros (and empty mappings) for all that is not given."""
    zeros = {
        field.name: {} if "Mapping" in str(field.type) else 0
        for field in dataclasses.fields(cls)
    }
    return cls(**{**zeros, **given})
