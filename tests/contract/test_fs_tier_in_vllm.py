# SPDX-License-Identifier: Apache-2.0
"""The tier made by vLLM's factory, in vLLM's spec and in ours, driven as the scheduler does."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.support import tier as support
from tests.support.tier import PAGE, key, make_config, make_spec
from vllm_tiered_offload import plugin
from vllm_tiered_offload.fs_tier.manager import ODirectFsTier
from vllm_tiered_offload.region.shared_region import SharedOffloadRegion

MIB = 1 << 20
CHUNKS = 8


@pytest.fixture(autouse=True)
def _registered() -> None:
    plugin.register()


class Engine:
    """A tiering manager and the memory its workers would fill."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.manager = spec.get_manager()
        self.rows = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self.row_bytes = len(self.rows) // self.manager.primary_tier._num_chunks

    @property
    def tiers(self) -> list[Any]:
        return list(self.manager.secondary_tiers)

    def stop(self) -> None:
        self.rows.release()
        self.manager.shutdown()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self, seconds: float = 20.0) -> None:
        """Step until no transfer is left."""
        deadline = time.monotonic() + seconds
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "transfers do not end"
            time.sleep(0.001)
            self.step()

    def store(self, numbers: Sequence[int]) -> None:
        """A request that computes chunk n as bytes of n + 1, and finishes."""
        keys = [key(n) for n in numbers]
        request = support.request(f"store-{numbers[0]}")
        for n, at in zip(numbers, keys, strict=True):
            if hasattr(request, "set_offload_key_position"):
                request.set_offload_key_position(at, n + 1)
        self.manager.on_new_request(request)
        out = self.manager.prepare_store(keys, request)
        assert out is not None
        for at, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            self._row(row)[:] = self.bytes_of(at)
        self.manager.complete_store(set(out.keys_to_store), request)
        self.manager.on_request_finished(request)
        self.settle()

    def prefix(self, numbers: Sequence[int], name: str = "") -> int:
        """How many leading chunks a new request gets, each checked byte for byte."""
        keys = [key(n) for n in numbers]
        request = support.request(name or f"load-{uuid.uuid4()}")
        self.manager.on_new_request(request)
        hits = self._scan(keys, request)
        if hits:
            source = self.manager.prepare_load(keys[:hits], request)
            for at, row in zip(keys, source.chunk_ids, strict=False):
                assert bytes(self._row(row)) == self.bytes_of(at)
            self.manager.complete_load(keys[:hits], request)
        self.manager.on_request_finished(request)
        self.settle()
        return hits

    def _scan(self, keys: Sequence[Any], request: Any, steps: int = 2000) -> int:
        for _ in range(steps):
            hits, deferred = 0, False
            for at in keys:
                result = self.manager.lookup(at, request)
                if result is LookupResult.MISS:
                    break
                deferred |= result is not LookupResult.HIT
                hits += 1
            if not deferred:
                return hits
            self.step()
            time.sleep(0.001)
        raise AssertionError("look-ups never settle")

    def _row(self, row: int) -> memoryview:
        return self.rows[row * self.row_bytes : (row + 1) * self.row_bytes]

    def bytes_of(self, at: bytes) -> bytes:
        return bytes([int.from_bytes(at[:32], "big") % 251 + 1]) * self.row_bytes


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    running: list[Engine] = []

    def start(spec: Any) -> Engine:
        running.append(Engine(spec))
        return running[-1]

    yield start
    for one in running:
        one.stop()


def stock(*tiers: dict[str, Any], **extra: Any) -> TieringOffloadingSpec:
    return TieringOffloadingSpec(make_config(tiers, chunks=CHUNKS, **extra))


def ours(root: Path, **keys: Any) -> dict[str, Any]:
    keys.setdefault("cache_namespace", "test")
    return {"type": "odirect_fs", "root_dir": str(root), "max_bytes": 64 * MIB, **keys}


def test_vllms_spec_stores_evicts_and_serves_from_our_tier(engine: Any, tmp_path: Path) -> None:
    one = engine(stock(ours(tmp_path)))
    assert isinstance(one.tiers[0], ODirectFsTier)
    for start in (0, 6, 12):  # 18 chunks through a pool of 8
        one.store(range(start, start + 6))
    assert one.prefix(range(6)) == 6
    assert one.prefix(range(100, 104)) == 0


def test_a_second_engine_finds_what_the_first_stored(engine: Any, tmp_path: Path) -> None:
    first = engine(stock(ours(tmp_path)))
    first.store(range(6))
    first.stop()
    assert engine(stock(ours(tmp_path))).prefix(range(8)) == 6


def test_a_reset_through_vllms_manager_is_a_reset_of_the_tier(
    engine: Any, tmp_path: Path
) -> None:
    one = engine(stock(ours(tmp_path)))
    alive = support.request("alive")
    one.manager.on_new_request(alive)
    one.store(range(6))
    one.manager.reset_cache()
    getattr(one.manager, "on_reset_flushed", lambda: None)()
    assert one.prefix(range(6)) == 0
    # The request that lived through the reset offers its blocks again.
    out = one.manager.prepare_store([key(7)], alive)
    one.manager.complete_store(set(out.keys_to_store), alive)
    one.settle()
    assert not one.tiers[0]._contains(key(7))
    one.store(range(6))
    one.store(range(20, 28))
    assert one.prefix(range(6)) == 6


def test_vllms_own_tier_beside_ours_gets_the_same_and_serves_alone(
    engine: Any, tmp_path: Path
) -> None:
    fs = {"type": "fs", "root_dir": str(tmp_path / "fs"), "n_read_threads": 1}
    fs["n_write_threads"] = 1
    both = engine(stock(fs, ours(tmp_path / "ours")))
    both.store(range(6))
    both.store(range(10, 18))
    assert both.prefix(range(6)) == 6
    both.stop()
    for tier in (fs, ours(tmp_path / "ours")):
        alone = engine(stock(tier))
        assert alone.prefix(range(6)) == 6
        alone.stop()


def test_two_tiers_of_ours_in_one_manager(engine: Any, tmp_path: Path) -> None:
    both = engine(stock(ours(tmp_path / "a"), ours(tmp_path / "b", locality="REMOTE")))
    both.store(range(6))
    stats = both.manager.get_stats().data["data"]
    stored = stats["vllm:kv_offload_odirect_stored_chunks"]
    assert stored == {("1:odirect_fs",): 6, ("2:odirect_fs",): 6}
    both.stop()
    for name in ("a", "b"):
        alone = engine(stock(ours(tmp_path / name)))
        assert alone.prefix(range(6)) == 6
        alone.stop()


def test_backpressure_reaches_the_tier_with_a_failure_threshold(
    engine: Any, tmp_path: Path
) -> None:
    if not hasattr(ODirectFsTier, "bp_detector"):
        pytest.skip("this vLLM has no backpressure")
    one = engine(
        stock(ours(tmp_path, backpressure={"backpressure_cls": "EMABackpressureDetector"}))
    )
    detector = one.tiers[0].bp_detector
    assert detector is not None
    expected = getattr(detector, "DEFAULT_FAILURE_THRESHOLD", None)
    assert getattr(detector, "_failure_threshold", None) == expected
    one.store(range(6))


def test_selected_by_module_path_without_the_plugin(tmp_path: Path) -> None:
    entry = {
        **ours(tmp_path),
        "type": "ODirectFsTier",
        "module_path": "vllm_tiered_offload.fs_tier.manager",
    }
    rows = memoryview(bytearray(CHUNKS * PAGE)).cast("b", (CHUNKS, PAGE))
    made = SecondaryTierFactory.create_secondary_tier(
        entry, rows, make_spec(make_config([entry]))
    )
    assert isinstance(made, ODirectFsTier)
    made.shutdown()


def test_metric_definitions_reach_vllms_spec(tmp_path: Path) -> None:
    config = {"secondary_tiers": [ours(tmp_path)]}
    found = TieringOffloadingSpec.build_metric_definitions(config)
    assert set(ODirectFsTier.build_metric_definitions({})) <= set(found)


@pytest.mark.skipif(
    not hasattr(TieringOffloadingSpec, "config_info_keys"), reason="vLLM 0.33 and later"
)
def test_facts_reach_vllms_info_metric(engine: Any, tmp_path: Path) -> None:
    entry = ours(tmp_path)
    one = engine(stock(entry))
    keys = TieringOffloadingSpec.config_info_keys({"secondary_tiers": [entry]})
    (series,) = (s for s in one.manager.config_info() if s.get("root_dir") == str(tmp_path))
    assert set(ODirectFsTier.config_info_keys(entry)) <= set(keys)
    assert set(ODirectFsTier.config_info_keys(entry)) <= set(series)
    assert series["tier"] == "1:odirect_fs"
    assert series["survives_restart"] is True


# --- with our region -----------------------------------------------------------------------


def _region_pair(chunks: int, row: int) -> tuple[SharedOffloadRegion, SharedOffloadRegion]:
    """A worker's mapping and the scheduler's."""
    engine_id = str(uuid.uuid4())
    made: list[SharedOffloadRegion] = []
    worker = threading.Thread(
        target=lambda: made.append(SharedOffloadRegion(engine_id, chunks, 0, row, row))
    )
    worker.start()
    worker.join(60)
    return made[0], SharedOffloadRegion(engine_id, chunks, None, row, row)


def test_what_a_worker_wrote_comes_back_through_the_disk(tmp_path: Path) -> None:
    worker, scheduler = _region_pair(CHUNKS, 2 * PAGE)
    view = scheduler.create_kv_memoryview()
    written = worker.create_kv_memoryview().cast("B")
    tier = ODirectFsTier(
        make_spec(make_config(page=2 * PAGE)), view, "odirect_fs",
        **{k: v for k, v in ours(tmp_path).items() if k != "type"},
    )  # fmt: skip
    try:
        size = 2 * PAGE
        for row in range(4):
            written[row * size : (row + 1) * size] = bytes([row + 1]) * size
        tier.submit_store(support.job(0, [key(n) for n in range(4)], range(4)))
        assert support.finished(tier, 1)[0].success
        tier.submit_load(support.job(1, [key(n) for n in range(4)], range(4, 8), load=True))
        assert support.finished(tier, 1)[1].success
        for row in range(4):
            at = (4 + row) * size
            assert bytes(written[at : at + size]) == bytes([row + 1]) * size
    finally:
        tier.shutdown()
        view.release()
        written.release()
        scheduler.cleanup()
        worker.cleanup()
