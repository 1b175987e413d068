# SPDX-License-Identifier: Apache-2.0
"""Random calls, as vLLM may make them, against a model of what the tier may answer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.kv_offload.base import LookupResult

from tests.support import tier as support
from tests.support.tier import PAGE, job, key, make_config, make_spec
from vllm_tiered_offload.fs_tier.manager import ODirectFsTier

ROWS = 12
KEYS = st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True)
NAMES = st.sampled_from(["a", "b", "c"])


def content(number: int) -> bytes:
    return bytes([number + 1]) * PAGE


class TierMachine(RuleBasedStateMachine):
    """`possible` holds the keys whose presence would not be a mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="tier-model-"))
        self.memory = support.page_aligned(ROWS * PAGE)
        self.possible: set[int] = set()
        self.persistent: set[int] = set()  # what a next process may find
        self.requests: dict[str, Any] = {}
        self.resets = 0
        self.born: dict[str, int] = {}
        self.free = list(range(ROWS))
        self.open: dict[int, tuple[bool, dict[int, int]]] = {}
        self.next_job = 0
        self.tier = self._start()

    def _start(self) -> ODirectFsTier:
        return ODirectFsTier(
            offloading_spec=make_spec(make_config()),
            primary_kv_view=self.memory.cast("b", (ROWS, PAGE)),
            tier_type="odirect_fs",
            root_dir=str(self.root),
            max_bytes="2MiB",
            cache_namespace="model",
            refresh_interval=0.05,
        )

    # --- requests ---

    @rule(name=NAMES)
    def request_comes(self, name: str) -> None:
        self.requests[name] = support.request(name)
        self.born[name] = self.resets
        self.tier.on_new_request(self.requests[name])

    @rule(name=NAMES)
    def request_ends(self, name: str) -> None:
        """Perhaps one that never came, or has ended."""
        self.tier.on_request_finished(self.requests.pop(name, support.request(name)))
        self.born.pop(name, None)

    # --- jobs ---

    @precondition(lambda self: self.requests and len(self.free) >= 5)
    @rule(data=st.data(), numbers=KEYS)
    def stores(self, data: st.DataObject, numbers: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        rows = {number: self.free.pop() for number in numbers}
        for number, row in rows.items():
            self.memory[row * PAGE : (row + 1) * PAGE] = content(number)
        if self.born[name] == self.resets:
            self.possible |= set(numbers)
            if self.resets == 0:
                self.persistent |= set(numbers)
        keys = {key(number): row for number, row in rows.items()}
        as_set = set(keys)
        order = [keys[at] for at in as_set]
        self._submit(self.tier.submit_store, as_set, order, rows, self.requests[name])

    @precondition(lambda self: len(self.free) >= 5)
    @rule(numbers=KEYS)
    def loads(self, numbers: list[int]) -> None:
        """What look-ups found; and now and then what they did not."""
        rows = {number: self.free.pop() for number in numbers}
        for row in rows.values():
            self.memory[row * PAGE : (row + 1) * PAGE] = bytes(PAGE)
        keys = [key(number) for number in rows]
        self._submit(self.tier.submit_load, keys, list(rows.values()), rows, support.request())

    def _submit(
        self, submit: Any, keys: Any, order: list[int], rows: dict[int, int], request: Any
    ) -> None:
        is_load = submit == self.tier.submit_load
        self.open[self.next_job] = (is_load, rows)
        submit(job(self.next_job, keys, order, load=is_load, context=request))
        self.next_job += 1

    @rule()
    def collects(self) -> None:
        for result in self.tier.get_finished_jobs():
            is_load, rows = self.open.pop(result.job_id)  # KeyError: twice, or never submitted
            if is_load:
                self._check_load(result, rows)
            self.free.extend(rows.values())

    def _check_load(self, result: Any, rows: dict[int, int]) -> None:
        loaded = set(rows)
        if not result.success:
            names = {bytes(at) for at in result.successful_keys or ()}
            loaded = {number for number in rows if bytes(key(number)) in names}
            assert len(loaded) == len(names)
        for number in loaded:
            row = rows[number]
            assert bytes(self.memory[row * PAGE : (row + 1) * PAGE]) == content(number)

    # --- the process ---

    @rule()
    def resets_the_cache(self) -> None:
        self.tier.drain_jobs()
        self.collects()
        assert not self.open
        self.resets += 1
        self.possible.clear()

    @rule()
    def restarts(self) -> None:
        self.tier.shutdown()
        self.collects()
        assert not self.open
        assert not self.tier.has_pending_work()
        self.tier = self._start()
        self.requests.clear()
        self.born.clear()
        self.resets = 0
        self.possible = set(self.persistent)

    @rule()
    def ends_a_step(self) -> None:
        self.tier.on_schedule_end(None)
        assert self.tier.get_stats() is not None

    @invariant()
    def nothing_is_found_that_cannot_be_there(self) -> None:
        request = support.request()
        found = {n for n in range(41) if self.tier.lookup(key(n), request) is LookupResult.HIT}
        assert found <= self.possible

    @invariant()
    def the_bound_holds(self) -> None:
        files = (path.stat() for path in self.root.rglob("*") if path.is_file())
        assert sum(stat.st_blocks * 512 for stat in files) <= 2 << 20

    def teardown(self) -> None:
        self.tier.shutdown()
        self.collects()
        assert not self.open
        assert sorted(self.free) == list(range(ROWS))
        shutil.rmtree(self.root)


TestTier = TierMachine.TestCase
TestTier.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
