# SPDX-License-Identifier: Apache-2.0
"""What the tier makes of vLLM's calls, over a store in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadPolicy
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from tests.support import tier as support
from tests.support.tier import PAGE, MemoryStore, finished, job, key, make_config, make_spec
from vllm_tiered_offload.config import ConfigError
from vllm_tiered_offload.fs_tier import wiring
from vllm_tiered_offload.fs_tier.adapters import AdapterTag, tagging
from vllm_tiered_offload.fs_tier.manager import ODirectFsTier
from vllm_tiered_offload.store import Completion, StoreError

HIT, MISS = LookupResult.HIT, LookupResult.MISS
ROWS = 16


@pytest.fixture(autouse=True)
def _memory_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "ChunkStore", MemoryStore)


@pytest.fixture
def memory() -> memoryview:
    """The CPU tier's rows; row r is filled with r + 1."""
    rows = memoryview(bytearray(ROWS * PAGE))
    for row in range(ROWS):
        rows[row * PAGE : (row + 1) * PAGE] = bytes([row + 1]) * PAGE
    return rows.cast("b", (ROWS, PAGE))


@pytest.fixture
def make(tmp_path: Path, memory: memoryview) -> Any:
    def build(spec: Any | None = None, **keys: Any) -> ODirectFsTier:
        keys.setdefault("root_dir", str(tmp_path))
        keys.setdefault("cache_namespace", "test")
        return ODirectFsTier(
            offloading_spec=spec or make_spec(),
            primary_kv_view=memory,
            tier_type="odirect_fs",
            **keys,
        )

    return build


@pytest.fixture
def tier(make: Any) -> ODirectFsTier:
    return make()


def store_of(tier: ODirectFsTier) -> Any:
    return tier._store


def test_it_is_a_storage_tier(tier: ODirectFsTier) -> None:
    assert isinstance(tier, SecondaryTierManager)
    assert tier.medium is Medium.STORAGE
    assert tier.tier_type == "odirect_fs"
    assert tier.on_new_request(support.request()).policy is OffloadPolicy.CHUNK_LEVEL


# --- construction --------------------------------------------------------------------------


def test_keys_reach_the_store(make: Any, tmp_path: Path) -> None:
    tier = make(
        root_dir=[str(tmp_path / "a"), str(tmp_path / "b")],
        max_bytes="1GiB",
        io_bytes="8MiB",
        n_read_threads=3,
        mode="read_write",
        stall_timeout=2,
        direct_io="off",
    )
    settings = store_of(tier).settings
    assert settings.root_dirs == (tmp_path / "a", tmp_path / "b")
    assert (settings.max_bytes, settings.io_bytes) == (1 << 30, 8 << 20)
    assert (settings.read_threads, settings.stall_timeout) == (3, 2.0)
    assert settings.direct_io == "off"
    assert store_of(tier).chunk_bytes == PAGE


def test_a_misspelt_key_is_refused_with_the_right_one(make: Any, tmp_path: Path) -> None:
    entry = {"type": "odirect_fs", "root_dir": str(tmp_path), "max_byte": 1}
    spec = make_spec(make_config([entry]))
    with pytest.raises(ConfigError, match=r"max_byte.*max_bytes"):
        make(spec, max_byte=1)


def test_a_keyword_of_a_newer_vllm_is_ignored(make: Any, tmp_path: Path) -> None:
    spec = make_spec(make_config([{"type": "odirect_fs", "root_dir": str(tmp_path)}]))
    tier = make(spec, poll_budget=object())
    assert tier.lookup(key(1), support.request()) is MISS


def test_a_bad_root_is_one_line_that_names_key_and_path(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError) as refused:
        make(root_dir=str(file))
    assert "root_dir" in str(refused.value)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_locality_is_what_vllm_filters_by(make: Any) -> None:
    assert make(locality="REMOTE").locality is Locality.REMOTE
    assert make().locality is None


def test_the_namespace_is_private_without_facts_or_cache_namespace(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert store_of(make(cache_namespace=None)).namespaces[0].private
    shared = store_of(make()).namespaces[0]
    assert not shared.private
    assert store_of(make()).namespaces[0].fingerprint == shared.fingerprint
    other = store_of(make(cache_namespace="other")).namespaces[0]
    assert other.fingerprint != shared.fingerprint


def test_a_view_that_is_not_rows_is_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="primary_kv_view"):
        ODirectFsTier(make_spec(), memoryview(bytearray(PAGE)), "t", root_dir=str(tmp_path))


@pytest.mark.skipif(
    not hasattr(SecondaryTierManager, "bp_detector"), reason="this vLLM has no backpressure"
)
def test_backpressure_keeps_the_failure_threshold_of_vllms_storage_tiers(make: Any) -> None:
    class Detector:
        DEFAULT_FAILURE_THRESHOLD = 3

        def __init__(self, threshold: int | None = None) -> None:
            self._failure_threshold = threshold

    assert make(backpressure_detector=Detector()).bp_detector._failure_threshold == 3
    assert make(backpressure_detector=Detector(7)).bp_detector._failure_threshold == 7
    old = object()  # detectors before 0.33 know no failures
    assert make(backpressure_detector=old).bp_detector is old
    assert make().bp_detector is None


# --- look-ups and jobs ---------------------------------------------------------------------


def test_store_then_hit_then_load(tier: ODirectFsTier, memory: memoryview) -> None:
    request = support.request()
    tier.on_new_request(request)
    assert tier.lookup(key(1), request) is MISS
    assert not tier.has_pending_work()
    tier.submit_store(job(0, {key(1)}, [3], context=request))
    assert tier.has_pending_work()
    assert tier.lookup(key(1), request) is MISS  # not written yet
    assert list(tier.get_finished_jobs()) == []
    store_of(tier).run()
    assert tier.lookup(key(1), request) is HIT
    stored = finished(tier, 1)[0]
    assert stored.success
    assert stored.transfer_time == 0.5
    support.assert_moved(stored, PAGE)
    assert not tier.has_pending_work()

    tier.submit_load(job(1, [key(1)], [9], load=True, context=request))
    store_of(tier).run()
    loaded = finished(tier, 1)[1]
    assert loaded.success
    assert loaded.successful_keys is None
    assert bytes(memory.cast("B")[9 * PAGE : 10 * PAGE]) == bytes([4]) * PAGE


def test_stores_go_in_prefix_order_with_their_rows(tier: ODirectFsTier) -> None:
    keys = {key(n): 16 * (n + 1) for n in range(8)}
    request = support.request(positions=keys)
    support.announce(tier, request, keys)
    as_set = set(keys)
    rows = [keys[at] // 16 for at in as_set]
    tier.submit_store(job(0, as_set, rows, context=request))
    _, _, stored, stored_rows = store_of(tier).jobs[0]
    assert stored == list(keys)
    assert stored_rows == list(range(1, 9))


def test_a_partly_failed_load_names_what_arrived_and_the_rest_is_a_miss(
    tier: ODirectFsTier, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [key(n) for n in range(4)]
    tier.submit_store(job(0, keys, range(4)))
    store_of(tier).run()
    store_of(tier).lost = {keys[1], keys[2]}
    tier.submit_load(job(1, keys, range(4, 8), load=True))
    store_of(tier).run()
    result = finished(tier, 2)[1]
    assert not result.success
    assert set(result.successful_keys) == {keys[0], keys[3]}
    support.assert_moved(result, 2 * PAGE)
    assert [tier.lookup(at, support.request()) for at in keys] == [HIT, MISS, MISS, HIT]


def test_a_load_that_lost_everything_names_no_keys(tier: ODirectFsTier) -> None:
    tier.submit_load(job(0, [key(1)], [0], load=True))
    store_of(tier).run()
    result = finished(tier, 1)[0]
    assert not result.success
    assert not result.successful_keys


@pytest.mark.parametrize("load", [False, True])
def test_a_job_that_the_store_refuses_fails_and_raises_nothing(
    tier: ODirectFsTier, load: bool
) -> None:
    store_of(tier).refuse = StoreError("closed")
    submit = tier.submit_load if load else tier.submit_store
    submit(job(5, [key(1)], [0], load=load))
    assert tier.has_pending_work()
    assert not finished(tier, 1)[5].success
    assert not tier.has_pending_work()


def test_completions_of_unknown_jobs_are_dropped(tier: ODirectFsTier) -> None:
    store_of(tier).complete(Completion(99, True, True, None, 0, 0.0, None))
    tier.submit_store(job(1, [key(1)], [0]))
    store_of(tier).run()
    store_of(tier).complete(Completion(1, False, True, None, 0, 0.0, None))
    assert list(finished(tier, 1)) == [1]
    assert list(tier.get_finished_jobs()) == []


def test_unknown_and_repeated_requests_are_no_trouble(tier: ODirectFsTier) -> None:
    tier.on_request_finished(support.request("never seen"))
    for _ in range(2):
        tier.on_new_request(support.request("twice"))
    for _ in range(2):
        tier.on_request_finished(support.request("twice"))
    tier.touch([key(1)], support.request("late"))
    assert tier.lookup(key(1), support.request("late")) is MISS


# --- reset ---------------------------------------------------------------------------------


def test_reset_drains_forgets_and_goes_on_in_a_private_namespace(tier: ODirectFsTier) -> None:
    before = support.request("before")
    tier.on_new_request(before)
    tier.submit_store(job(0, [key(1)], [0], context=before))
    tier.drain_jobs()
    assert finished(tier, 1)[0].success
    assert tier.lookup(key(1), before) is MISS
    first, second = store_of(tier).namespaces
    assert not first.private
    assert second.private
    assert second.fingerprint != first.fingerprint


def test_requests_alive_at_a_reset_are_not_stored_and_later_ones_are(
    tier: ODirectFsTier,
) -> None:
    alive = support.request("alive")
    tier.on_new_request(alive)
    tier.drain_jobs()
    tier.submit_store(job(0, [key(1)], [0], context=alive))
    unknown = support.request("unknown")  # not known to be of after the reset either
    tier.submit_store(job(1, [key(2)], [1], context=unknown))
    assert not store_of(tier).jobs
    results = finished(tier, 2)
    for result in results.values():
        assert result.success
        support.assert_moved(result, 0)

    tier.on_request_finished(alive)
    tier.on_new_request(alive)  # the same name again, after the reset
    tier.submit_store(job(2, [key(3)], [2], context=alive))
    store_of(tier).run()
    assert tier.lookup(key(3), alive) is HIT
    tier.drain_jobs()
    assert tier.lookup(key(3), alive) is MISS


def test_every_reset_has_its_own_namespace(tier: ODirectFsTier) -> None:
    for _ in range(3):
        tier.drain_jobs()
    assert len({n.fingerprint for n in store_of(tier).namespaces}) == 4


def test_on_reset_keep_only_drains(make: Any) -> None:
    tier = make(on_reset="keep")
    alive = support.request("alive")
    tier.on_new_request(alive)
    tier.submit_store(job(0, [key(1)], [0], context=alive))
    tier.drain_jobs()
    assert finished(tier, 1)[0].success
    assert tier.lookup(key(1), alive) is HIT
    tier.submit_store(job(1, [key(2)], [0], context=alive))
    assert len(store_of(tier).jobs) == 1
    assert len(store_of(tier).namespaces) == 1


def test_a_reset_that_finds_no_namespace_switches_the_tier_off(
    tier: ODirectFsTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier.submit_store(job(0, [key(1)], [0]))
    tier.drain_jobs()
    request = support.request()
    tier.on_new_request(request)
    tier.submit_store(job(1, [key(2)], [0], context=request))
    store_of(tier).run()
    store_of(tier).refuse = StoreError("read-only file system (EROFS)")
    tier.drain_jobs()
    tier.on_new_request(request)
    assert tier.lookup(key(2), request) is MISS
    tier.submit_store(job(2, [key(2)], [0], context=request))
    tier.submit_load(job(3, [key(2)], [0], load=True, context=request))
    results = finished(tier, 4)
    assert results[2].success
    support.assert_moved(results[2], 0)
    assert tier.get_stats() is not None  # the operator still sees what happened
    assert not results[3].success


# --- the end -------------------------------------------------------------------------------


def test_everything_is_safe_after_shutdown(tier: ODirectFsTier) -> None:
    tier.submit_store(job(0, [key(1)], [0]))
    tier.submit_load(job(1, [key(1)], [0], load=True))
    tier.shutdown()
    tier.shutdown()
    results = finished(tier, 2)
    assert not results[0].success
    assert not results[1].success
    request = support.request()
    tier.on_new_request(request)
    assert tier.lookup(key(1), request) is MISS
    tier.submit_store(job(2, [key(1)], [0], context=request))
    tier.submit_load(job(3, [key(1)], [0], load=True, context=request))
    assert set(finished(tier, 2)) == {2, 3}
    tier.drain_jobs()
    tier.on_request_finished(request)
    assert list(tier.take_events()) == []
    assert tier.get_stats() is None
    assert not tier.has_pending_work()


def test_a_stuck_thread_keeps_vllm_from_unmapping_the_pool(tier: ODirectFsTier) -> None:
    tier.submit_load(job(0, [key(1)], [0], load=True))
    store_of(tier).ends_in_time = False
    with pytest.raises(RuntimeError, match="stays mapped"):
        tier.shutdown()
    # The kernel may still write to the row: the job is not reported.
    assert list(tier.get_finished_jobs()) == []
    assert tier.lookup(key(1), support.request()) is MISS
    store_of(tier).ends_in_time = True
    tier.shutdown()
    assert not finished(tier, 1)[0].success


# --- events --------------------------------------------------------------------------------


@pytest.fixture
def with_events(make: Any) -> ODirectFsTier:
    spec = make_spec(make_config(events=True))
    return make(spec, enable_kv_events=True, locality="LOCAL")


def test_events_tell_of_stores_and_removals(with_events: ODirectFsTier) -> None:
    tier = with_events
    tier.submit_store(job(0, [key(1), key(2)], [0, 1]))
    assert list(tier.take_events()) == []  # not durable yet
    store_of(tier).run()
    (stored,) = tier.take_events()
    assert set(stored.keys) == {key(1), key(2)}
    assert stored.medium is Medium.STORAGE
    assert stored.locality is Locality.LOCAL
    assert not stored.removed
    assert stored.removal_expected
    store_of(tier).evict(key(1))
    (gone,) = tier.take_events()
    assert gone.removed
    assert list(gone.keys) == [key(1)]
    assert list(tier.take_events()) == []


def test_no_events_unless_asked_for(make: Any) -> None:
    tier = make(make_spec(make_config(events=True)))
    tier.submit_store(job(0, [key(1)], [0]))
    store_of(tier).run()
    assert list(tier.take_events()) == []
    assert not store_of(tier).events_enabled


def test_no_events_where_vllm_has_them_off(make: Any) -> None:
    tier = make(make_spec(make_config(events=False)), enable_kv_events=True)
    assert not store_of(tier).events_enabled


# --- adapters ------------------------------------------------------------------------------


def tagged(adapter: int) -> Any:
    request = support.request(f"adapter-{adapter}")
    request.set_state(AdapterTag(adapter))
    return request


def test_requests_with_an_adapter_use_keys_of_this_process(make: Any) -> None:
    with tagging():
        tier = make(make_spec(make_config(events=True)), enable_kv_events=True)
    assert not store_of(tier).namespaces[0].private  # the base model's KV is persistent
    one, two, base = tagged(1), tagged(2), support.request("base")
    for request in (one, two, base):
        tier.on_new_request(request)
    keys = [key(1), key(2)]
    tier.submit_store(job(0, keys, [0, 1], context=one))
    store_of(tier).run()
    assert not set(keys) & set(store_of(tier).held)
    assert [tier.lookup(key(1), r) for r in (one, two, base)] == [HIT, MISS, MISS]
    (event,) = tier.take_events()
    assert list(event.keys) == keys  # as vLLM knows them

    lost = next(iter(store_of(tier).held))
    store_of(tier).lost = {lost}
    tier.submit_load(job(1, keys, [2, 3], load=True, context=one))
    store_of(tier).run()
    result = finished(tier, 2)[1]
    assert list(result.successful_keys) == [key(2)]


def test_without_a_tagging_connector_tags_are_ignored(tier: ODirectFsTier) -> None:
    request = tagged(1)
    tier.on_new_request(request)
    tier.submit_store(job(0, [key(1)], [0], context=request))
    store_of(tier).run()
    assert set(store_of(tier).held) == {key(1)}
