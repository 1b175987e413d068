# SPDX-License-Identifier: Apache-2.0
"""Random sequences of scheduler calls, for vLLM's manager and ours, against one model.

The model knows which bytes belong under which key, what was ever stored, and what is
under way. It checks after every call that a HIT has its bytes, that rows in use keep
theirs, and in the end that nothing is left behind. Ours must stand callbacks out of
order besides, and keep its own bounds.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from tests.support.tiering import Bench, Prompt, chain, content
from vllm_tiered_offload.manager import PinnedTieringManager, PinSettings

EXAMPLES = int(os.environ.get("VTO_LIFECYCLE_EXAMPLES", "40"))
CHAINS, LENGTH = 4, 12
shares = st.floats(0.1, 1.0)


@dataclass
class Running:
    """A request as the scheduler sees it."""

    prompt: Prompt
    state: str = "waiting"  # waiting, loading, running, finished
    loading: list[Any] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    stores: list[dict[Any, int]] = field(default_factory=list)  # key -> row
    stored: int = 0
    stale: bool = False
    reads_before: dict[int, int] = field(default_factory=dict)  # by tier, at its start


class Lifecycle(RuleBasedStateMachine):
    """Only what vLLM's scheduler does."""

    manager: type[TieringOffloadingManager] = TieringOffloadingManager

    @initialize(
        chunks=st.integers(3, 30),
        policy=st.sampled_from(["lru", "arc"]),
        tiers=st.integers(1, 2),
        slow=st.booleans(),
        shy=st.booleans(),
        groups=st.integers(1, 2),
        pins=st.builds(
            PinSettings,
            max_share=shares,
            deadline=st.sampled_from([0.05, 10.0]),
            patience=st.sampled_from([0.0, 0.1]),
            store_headroom=st.floats(0.0, 0.5),
        ),
    )
    def begin(
        self,
        chunks: int,
        policy: str,
        tiers: int,
        slow: bool,
        shy: bool,
        groups: int,
        pins: PinSettings,
    ) -> None:
        options = {"pins": pins} if self.manager is not TieringOffloadingManager else {}
        self.bench = Bench(
            chunks, self.manager, tiers=tiers, groups=groups, policy=policy, **options
        )
        for tier in self.bench.tiers:
            tier.slow, tier.shy = slow, shy
        self.groups = groups
        self.pins = pins
        self.requests: list[Running] = []
        self.ever: set[Any] = set()
        self.names = 0
        self.started: list[Prompt] = []

    def pick(self, which: int, *states: str) -> Running | None:
        fitting = [r for r in self.requests if r.state in states]
        return fitting[which % len(fitting)] if fitting else None

    # --- requests ---

    @rule(number=st.integers(0, CHAINS - 1), length=st.integers(1, LENGTH))
    def arrive(self, number: int, length: int) -> None:
        self.names += 1
        groups = [chain(number, length, group) for group in range(self.groups)]
        windows = [None, 3][: self.groups]
        prompt = self.bench.request(f"r{self.names}", *groups, windows=windows)
        self.requests.append(Running(prompt))

    @rule(which=st.integers(0, 99))
    def look_up(self, which: int) -> None:
        request = self.pick(which, "waiting")
        if request is None or request.stores:
            return
        found = self.bench.look_up(request.prompt)
        if found is None:
            return
        request.reads_before = {id(t): len(t.load_jobs) for t in self.bench.tiers}
        if found == 0:
            request.state = "running"
            self.started.append(request.prompt)
            return
        for keys, window in zip(request.prompt.groups, request.prompt.windows, strict=True):
            request.loading += keys[:found][-window:] if window else keys[:found]
        spec = self.bench.manager.prepare_load(request.loading, request.prompt.context)
        request.rows = spec.chunk_ids.tolist()
        request.state = "loading"
        self.check_rows(request)

    def check_rows(self, request: Running) -> None:
        for key, row in zip(request.loading, request.rows, strict=True):
            assert key in self.ever
            assert bytes(self.bench.region.memory[self.bench.region.row(row)]) == content(key)

    @rule(which=st.integers(0, 99))
    def loaded(self, which: int) -> None:
        request = self.pick(which, "loading", "aborted")
        if request is None:
            return
        self.check_rows(request)
        self.bench.manager.complete_load(set(request.loading), request.prompt.context)
        request.loading, request.rows = [], []
        if request.state == "aborted":
            self.requests.remove(request)
        else:
            request.state = "running"
            self.started.append(request.prompt)

    @rule(which=st.integers(0, 99), count=st.integers(1, LENGTH))
    def store(self, which: int, count: int) -> None:
        request = self.pick(which, "running")
        if request is None:
            return
        keys = [
            key
            for group in request.prompt.groups
            for key in group[request.stored : request.stored + count]
        ]
        if not keys:
            return
        out = self.bench.manager.prepare_store(keys, request.prompt.context)
        if out is None:
            return
        request.stored += count
        assert set(out.keys_to_store) <= set(keys)
        assert not (request.stale and out.keys_to_store)
        rows = out.store_spec.chunk_ids.tolist()
        if rows:
            request.stores.append(dict(zip(out.keys_to_store, rows, strict=True)))

    @rule(which=st.integers(0, 99), success=st.booleans())
    def stored(self, which: int, success: bool) -> None:
        storing = [r for r in self.requests if r.stores]
        if not storing:
            return
        request = storing[which % len(storing)]
        rows = request.stores.pop(0)
        for key, row in rows.items():
            self.bench.region.memory[self.bench.region.row(row)] = content(key)
        if success:
            self.ever.update(rows)
        self.bench.manager.complete_store(set(rows), request.prompt.context, success)
        self.drop_if_done(request)

    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        request = self.pick(which, "waiting", "loading", "running")
        if request is None:
            return
        self.bench.finish(request.prompt)
        request.state = "aborted" if request.loading else "finished"
        self.drop_if_done(request)

    def drop_if_done(self, request: Running) -> None:
        if request.state == "finished" and not request.stores:
            self.requests.remove(request)

    # --- the step and the world ---

    @rule(preempt=st.integers(0, 99), really=st.booleans())
    def end_step(self, preempt: int, really: bool) -> None:
        victim = self.pick(preempt, "running") if really else None
        names = []
        if victim is not None and not victim.stores:
            victim.state, victim.stored = "waiting", 0
            names = [victim.prompt.context.req_id]
        started = [p for p in self.started if p.context.req_id not in names]
        self.bench.end_step(*started, preempted=names)
        self.started.clear()
        self.bench.clock.now += 0.01

    @rule(count=st.integers(1, 3), tier=st.integers(0, 1))
    def disk(self, count: int, tier: int) -> None:
        self.bench.tiers[tier % len(self.bench.tiers)].run(count)

    @rule(seconds=st.sampled_from([0.02, 0.2, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.clock.now += seconds

    @rule(number=st.integers(0, CHAINS - 1), length=st.integers(1, LENGTH))
    def another_process_stores(self, number: int, length: int) -> None:
        for group in range(self.groups):
            self.bench.stored(keys := chain(number, length, group))
            self.ever.update(keys)

    @rule(number=st.integers(0, CHAINS - 1), at=st.integers(0, LENGTH - 1), gone=st.booleans())
    def a_chunk_goes_bad(self, number: int, at: int, gone: bool) -> None:
        key = chain(number, LENGTH)[at]
        for tier in self.bench.tiers:
            if gone:
                tier.held.pop(key, None)
            else:
                tier.bad ^= {key}

    @rule()
    def reset(self) -> None:
        self.bench.manager.reset_cache()
        flushed = getattr(self.bench.manager, "on_reset_flushed", None)
        if flushed is not None:
            flushed()
        for tier in self.bench.tiers:
            tier.held.clear()
        self.ever.clear()
        for request in list(self.requests):
            request.stores.clear()
            request.loading, request.rows = [], []
            request.stored = 0
            request.stale = self.manager is not TieringOffloadingManager
            if request.state in ("finished", "aborted"):
                self.requests.remove(request)
            elif request.state == "loading":
                request.state = "waiting"

    @rule()
    def report(self) -> None:
        self.bench.manager.get_stats()
        list(self.bench.manager.take_events())

    # --- what must hold ---

    @invariant()
    def rows_in_use_keep_their_bytes(self) -> None:
        for request in getattr(self, "requests", ()):
            if request.loading:
                self.check_rows(request)

    @invariant()
    def the_pools_counters_are_sound(self) -> None:
        if hasattr(self, "bench"):
            pool = self.bench.pool
            assert 0 <= pool._num_evictable_cache_chunks <= pool._num_chunks
            assert len(set(pool._free_list)) == len(pool._free_list)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for request in list(self.requests):
            for rows in request.stores:
                self.bench.manager.complete_store(set(rows), request.prompt.context, False)
            if request.loading:
                self.bench.manager.complete_load(set(request.loading), request.prompt.context)
            if request.state not in ("finished", "aborted"):
                self.bench.finish(request.prompt)
        self.bench.assert_idle()
        self.bench.manager.shutdown()


class Hardened(Lifecycle):
    """And what it should never do."""

    manager = PinnedTieringManager

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99), number=st.integers(0, CHAINS), ok=st.booleans())
    def stray_callbacks(self, which: int, number: int, ok: bool) -> None:
        context = self.requests[which % len(self.requests)].prompt.context
        # Keys of nothing that is under way for this request.
        strays = set(chain(CHAINS + 1, 3))
        self.bench.manager.complete_load(strays, context)
        self.bench.manager.complete_store(strays, context, ok)

    @rule(which=st.integers(0, 99))
    def finish_again(self, which: int) -> None:
        request = self.pick(which, "finished", "aborted")
        if request is not None:
            self.bench.finish(request.prompt)
            out = self.bench.manager.prepare_store(chain(9, 2), request.prompt.context)
            assert out.keys_to_store == []
            answer = self.bench.manager.lookup(chain(9, 1)[0], request.prompt.context)
            assert answer is LookupResult.MISS

    @invariant()
    def pins_and_promotions_stay_below_the_cap(self) -> None:
        if hasattr(self, "bench"):
            counts = self.bench.manager._book.counts()
            held = counts["pinned"] + counts["flying"] + counts["queued"]
            assert held <= max(1, int(self.bench.pool._num_chunks * self.pins.max_share))

    @invariant()
    def no_key_is_read_twice_for_one_admission(self) -> None:
        for tier in self.bench.tiers if hasattr(self, "bench") else ():
            reads = Counter(
                (request.prompt.context.req_id, key)
                for request in self.requests
                for job in tier.load_jobs[request.reads_before.get(id(tier), 0) :]
                if job.req_context is request.prompt.context
                for key in job.keys
            )
            assert all(count == 1 for count in reads.values())


def _profile() -> settings:
    return settings(
        max_examples=EXAMPLES,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


TestVllm = Lifecycle.TestCase
TestVllm.settings = _profile()
TestOurs = Hardened.TestCase
TestOurs.settings = _profile()
