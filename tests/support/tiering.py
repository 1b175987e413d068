# SPDX-License-Identifier: Apache-2.0
"""A tiering manager without an engine: a pool of real bytes and tiers in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

ROW_BYTES = 64
TOKENS = 16  # in one chunk
POSITIONS = hasattr(ReqContext, "set_offload_key_position")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class PoolRegion:
    """What vLLM's CPU tier needs of a region."""

    def __init__(self, chunks: int) -> None:
        self.memory = bytearray(chunks * ROW_BYTES)
        self.chunks = chunks
        self.cleanups = 0

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.memory).cast("b", (self.chunks, ROW_BYTES))

    def cleanup(self) -> None:
        self.cleanups += 1

    def row(self, chunk: int) -> slice:
        return slice(chunk * ROW_BYTES, (chunk + 1) * ROW_BYTES)


class MemoryTier(SecondaryTierManager):
    """A tier that keeps bytes in a dictionary and does its jobs when told to.

    Attributes:
        held: what is stored, by key.
        slow: jobs wait for `run()`; otherwise they end at once.
        bad: keys whose loads fail although `lookup` says HIT.
        shy: first look-ups of a key are answered RETRY, as an asynchronous tier does.
    """

    medium = Medium.STORAGE

    def __init__(self, region: PoolRegion, view: memoryview, groups: int = 1) -> None:
        config = SimpleNamespace(groups=tuple(range(groups)))
        super().__init__(SimpleNamespace(config=config), view, "memory")
        self.region = region
        self.held: dict[bytes, bytes] = {}
        self.slow = self.shy = False
        self.bad: set[bytes] = set()
        self.loads: list[bytes] = []  # every key ever read, in order
        self.jobs_submitted = 0
        self.load_jobs: list[TransferJob] = []
        self.asked: set[bytes] = set()
        self.drains = self.shutdowns = 0
        self.open: list[TransferJob] = []
        self.results: list[JobResult] = []
        self.requests: set[str] = set()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        if self.shy and key not in self.asked:
            self.asked.add(key)
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.held else LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        self._submit(job)

    def submit_load(self, job: TransferJob) -> None:
        self.loads.extend(job.keys)
        self.load_jobs.append(job)
        self._submit(job)

    def _submit(self, job: TransferJob) -> None:
        assert len(job.keys) == len(job.chunk_ids) == len(set(job.chunk_ids.tolist()))
        self.jobs_submitted += 1
        self.open.append(job)
        if not self.slow:
            self.run()

    def run(self, count: int | None = None) -> None:
        """Do the oldest `count` jobs, all by default."""
        for _ in range(len(self.open) if count is None else min(count, len(self.open))):
            job = self.open.pop(0)
            self.results.append(self._load(job) if job.is_promotion else self._store(job))

    def _store(self, job: TransferJob) -> JobResult:
        for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            self.held[key] = bytes(self.region.memory[self.region.row(chunk)])
        return JobResult(job.job_id, True)

    def _load(self, job: TransferJob) -> JobResult:
        good = [key for key in job.keys if key in self.held and key not in self.bad]
        for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            row = self.region.row(chunk)
            self.region.memory[row] = self.held[key] if key in good else b"?" * ROW_BYTES
        if len(good) == len(job.keys):
            return JobResult(job.job_id, True)
        return JobResult(job.job_id, False, successful_keys=good)

    def get_finished_jobs(self) -> list[JobResult]:
        results, self.results = self.results, []
        return results

    def has_pending_work(self) -> bool:
        return bool(self.open or self.results)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.requests.discard(req_context.req_id)

    def drain_jobs(self) -> None:
        self.drains += 1
        self.run()

    def shutdown(self) -> None:
        self.shutdowns += 1


def content(key: bytes) -> bytes:
    """The bytes that belong under `key`."""
    return (key * (ROW_BYTES // len(key) + 1))[:ROW_BYTES]


def chain(name: int, length: int, group: int = 0) -> list[Any]:
    """Keys of a prompt: the same name, the same prefix."""
    return [
        make_offload_key(name.to_bytes(16, "big") + i.to_bytes(16, "big"), group)
        for i in range(length)
    ]


@dataclass
class Prompt:
    """A request with its chunks by KV group; `windows` has None for full attention."""

    context: ReqContext
    groups: list[list[Any]]
    windows: list[int | None]
    hits: int | None = None  # tokens it started with
    steps: int = 0
    loaded: list[Any] = field(default_factory=list)


class Bench:
    """One manager, its pool and its tiers; `step` is one step of vLLM's scheduler."""

    def __init__(
        self,
        chunks: int,
        manager: type[TieringOffloadingManager],
        *,
        tiers: int = 1,
        groups: int = 1,
        policy: str = "lru",
        events: bool = False,
        **options: Any,
    ) -> None:
        self.clock = Clock()
        self.region = PoolRegion(chunks)
        self.pool = CPUPrimaryTierOffloadingManager(
            chunks, self.region, cache_policy=policy, enable_events=events
        )
        view = self.pool.get_kv_memoryview()
        self.tiers = [MemoryTier(self.region, view, groups) for _ in range(tiers)]
        if manager is not TieringOffloadingManager:
            options.setdefault("clock", self.clock)
        self.manager = manager(self.pool, list(self.tiers), **options)
        self.tier = self.tiers[0]

    # --- what is on the tier ---

    def stored(self, keys: Collection[Any], tier: int = 0) -> None:
        self.tiers[tier].held.update((key, content(key)) for key in keys)

    # --- requests ---

    def request(
        self,
        name: str,
        *groups: Sequence[Any],
        windows: Sequence[int | None] | None = None,
    ) -> Prompt:
        context = ReqContext(req_id=name)
        for keys in groups if POSITIONS else ():
            for i, key in enumerate(keys, 1):
                context.set_offload_key_position(key, i * TOKENS)
        self.manager.on_new_request(context)
        return Prompt(context, [list(g) for g in groups], list(windows or [None] * len(groups)))

    def look_up(self, prompt: Prompt) -> int | None:
        """vLLM's own search for the longest usable prefix, in chunks; None: later."""
        found = _searcher(self.manager, prompt.windows)._lookup_complete_chunks(_status(prompt))
        return None if found is None else found // TOKENS

    def try_start(self, prompt: Prompt) -> bool:
        """Look up and, if vLLM would go on, load what was found."""
        prompt.steps += 1
        found = self.look_up(prompt)
        if found is None:
            return False
        prompt.hits = found
        if found:
            for keys, window in zip(prompt.groups, prompt.windows, strict=True):
                prompt.loaded += keys[:found][-window:] if window else keys[:found]
            self.load(prompt.context, prompt.loaded)
        return True

    def load(self, context: ReqContext, keys: list[Any]) -> None:
        """prepare_load, compare every row with what belongs there, complete_load."""
        spec = self.manager.prepare_load(keys, context)
        for key, chunk in zip(keys, spec.chunk_ids.tolist(), strict=True):
            assert bytes(self.region.memory[self.region.row(chunk)]) == content(key)
        self.manager.complete_load(set(keys), context)

    def step(self, *prompts: Prompt) -> list[Prompt]:
        """One scheduler step for waiting requests; returns those that started."""
        started = [prompt for prompt in prompts if self.try_start(prompt)]
        self.end_step(*started)
        return started

    def end_step(self, *started: Prompt, preempted: Sequence[str] = ()) -> None:
        names = [prompt.context.req_id for prompt in started]
        self.manager.on_schedule_end(ScheduleEndContext(names, preempted))

    def run(self, prompt: Prompt, steps: int = 200, seconds: float = 0.01) -> int | None:
        """Steps until the request starts; its chunks, None if it never does."""
        for _ in range(steps):
            if self.step(prompt):
                return prompt.hits
            self.clock.now += seconds
        return None

    def store(self, prompt: Prompt, keys: Sequence[Any]) -> list[Any]:
        """The GPU's blocks to the pool (and from there to the tiers)."""
        out = self.manager.prepare_store(keys, prompt.context)
        if out is None or not out.keys_to_store:
            return []
        for key, chunk in zip(
            out.keys_to_store, out.store_spec.chunk_ids.tolist(), strict=True
        ):
            self.region.memory[self.region.row(chunk)] = content(key)
        self.manager.complete_store(set(out.keys_to_store), prompt.context)
        return list(out.keys_to_store)

    def finish(self, prompt: Prompt) -> None:
        self.manager.on_request_finished(prompt.context)

    # --- what must be left when nothing is under way ---

    def assert_idle(self) -> None:
        """Once the tiers have done their jobs no row, record or job is left behind."""
        manager, pool = self.manager, self.pool
        for _ in range(2):  # vLLM polls once a step
            for tier in self.tiers:
                tier.run()
            self.end_step()
        in_use = pool._num_allocated_chunks - len(pool._free_list)
        assert in_use == pool._num_evictable_cache_chunks, "a row is pinned for good"
        assert pool._num_write_pending_chunks == 0, "a row waits for a write for good"
        assert len(pool._policy.chunks if hasattr(pool._policy, "chunks") else ()) in (
            0,
            in_use,
        )
        assert not manager._jobs
        assert not manager._req_state
        assert not manager._metrics._request_states
        assert not manager._pending_load_submissions
        assert not getattr(manager, "_request_load_sources", {})
        for tier in self.tiers:
            assert not tier.requests
        book = getattr(manager, "_book", None)
        if book is not None:
            assert not any(book.counts().values()), book.counts()
            assert len(manager._transfers) == 0


def _searcher(manager: Any, windows: Sequence[int | None]) -> Any:
    """vLLM's scheduler with just enough to search: no engine, no configuration."""
    searcher = object.__new__(OffloadingConnectorScheduler)
    searcher.manager = manager
    searcher._events_tracker = MagicMock()
    searcher._chunks_being_loaded = None
    searcher._mamba_align_size = None
    full = [i for i, window in enumerate(windows) if window is None]
    sliding = [i for i, window in enumerate(windows) if window is not None]
    searcher._full_attention_groups = tuple(full)
    searcher._sliding_window_groups = tuple(sliding)
    searcher._lookup_groups = (*full, *sliding)
    configs = [
        GroupOffloadConfig(
            group_idx=i,
            tokens_per_block=TOKENS,
            tokens_per_chunk=TOKENS,
            hashes_per_chunk=1,
            kv_event_group_spec=MagicMock(),
            sliding_window_size_in_chunks=window,
            kv_cache_spec=None,
            manager_cls=None,
        )
        for i, window in enumerate(windows)
    ]
    searcher.config = SimpleNamespace(kv_group_configs=configs)
    return searcher


def _status(prompt: Prompt) -> Any:
    longest = max(len(keys) for keys in prompt.groups)
    # One token more than the chunks: the last one is always computed.
    return SimpleNamespace(
        num_locally_computed_tokens=0,
        max_load_tokens=None,
        req=SimpleNamespace(num_tokens=longest * TOKENS + 1, request_id=prompt.context.req_id),
        req_context=prompt.context,
        group_states=[
            SimpleNamespace(offload_keys=keys, lookup_hit_end_chunk_idx=0)
            for keys in prompt.groups
        ],
    )
