# SPDX-License-Identifier: Apache-2.0
"""One memory for all workers and the scheduler, whoever comes first."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.region_process import RegionProcess, fill, holdings, rows, wrong_slots
from tests.unit.region.conftest import ROW, SLOT, together
from vllm_tiered_offload.region import opening, pinning
from vllm_tiered_offload.region.shared_region import (
    RegionError,
    RegionSettings,
    SharedOffloadRegion,
)

Start = Callable[[], RegionProcess]
BACKINGS = ["memfd", "shm"]


def with_backing(engine: dict[str, Any], backing: str, **more: Any) -> dict[str, Any]:
    return engine | {"settings": RegionSettings(backing=backing, **more)}


@pytest.mark.parametrize("backing", BACKINGS)
def test_four_processes_and_a_scheduler_share_every_byte(
    backing: str, engine: dict[str, Any], start: Start, no_leftovers_in_shm: None
) -> None:
    engine = with_backing(engine, backing)
    workers = [start() for _ in range(4)]
    assert all(set(known) == {0, 1, 2, 3} for known in together(workers, engine))
    scheduler = SharedOffloadRegion(rank=None, **engine)
    scheduler.require_ranks(4)
    assert scheduler.rank_facts == {r: {"pid": p.pid} for r, p in enumerate(workers)}

    for rank, worker in enumerate(workers):
        worker.tell("fill", rank=rank)
    for worker in workers:
        worker.answer()
    assert wrong_slots(scheduler, 4) == []
    assert [w.do("wrong", ranks=4) for w in workers] == [[], [], [], []]
    assert (rows(scheduler)[:, 4 * SLOT :] == 0).all()  # nobody writes the padding

    rows(scheduler)[5, 2 * SLOT] += 1
    assert workers[0].do("wrong", ranks=4) == [(2, 5)]
    scheduler.cleanup()
    for worker in workers:
        worker.do("cleanup")


@pytest.mark.parametrize("backing", BACKINGS)
def test_worker_and_scheduler_in_one_process(
    backing: str, engine: dict[str, Any], no_leftovers_in_shm: None
) -> None:
    engine = with_backing(engine, backing) | {"world_size": 1}
    worker = SharedOffloadRegion(rank=0, facts={"a": [1]}, **engine)
    assert worker.joined_ranks == {0}
    scheduler = SharedOffloadRegion(rank=None, **engine)
    scheduler.require_ranks(1)
    assert scheduler.rank_facts == {0: {"a": [1]}}
    fill(worker, 0)
    assert wrong_slots(scheduler, 1) == []
    worker.cleanup()
    assert wrong_slots(scheduler, 1) == []  # each has a mapping of its own
    scheduler.cleanup()
    scheduler.cleanup()
    assert holdings() == []


@pytest.mark.parametrize("backing", BACKINGS)
def test_racing_threads_end_with_one_region(backing: str, engine: dict[str, Any]) -> None:
    for attempt in range(5):
        arguments = with_backing(engine, backing) | {
            "engine_id": f"race {attempt} {id(engine)}"
        }
        made: dict[int, SharedOffloadRegion] = {}

        def open_one(rank: int, arguments: Any = arguments, made: Any = made) -> None:
            made[rank] = SharedOffloadRegion(rank=rank, **arguments)

        ranks = random.sample(range(4), 4)
        threads = [threading.Thread(target=open_one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank, region in made.items():
            fill(region, rank)
        assert [wrong_slots(region, 4) for region in made.values()] == [[]] * 4
        for region in made.values():
            region.cleanup()
    assert holdings() == []


def test_views_of_ranks_do_not_overlap_and_stay_in_the_row() -> None:
    pytest.importorskip("torch")
    regions = [
        SharedOffloadRegion(
            f"views {rank}", 3, rank, ROW, SLOT, world_size=4, scheduler_joins=False,
            settings=RegionSettings(join_timeout=0.01),
        )
        for rank in range(4)
    ]  # fmt: skip
    taken: set[int] = set()
    for region in regions:
        base = region._base.data_ptr()
        for size in (1000, 2500, 500):
            view = region.create_next_worker_view(size)
            assert view.shape == (3, size)
            assert view.stride() == (ROW, 1)
            start = view.data_ptr() - base
            cells = set(range(start, start + size))
            assert not cells & taken
            assert start + size <= ROW
            taken |= cells
        with pytest.raises(RegionError, match="1 bytes more than its slot of 4000"):
            region.create_next_worker_view(1)
        del view
        region.cleanup()
    assert taken == set(range(4 * SLOT))


def test_memory_stays_until_the_last_view_is_gone(engine: dict[str, Any]) -> None:
    region = SharedOffloadRegion(rank=0, **(engine | {"world_size": 1}))
    view = region.create_kv_memoryview()
    region.cleanup()
    view[3, 5] = 9  # a tier's thread may still be copying
    assert view[3, 5] == 9
    assert len(holdings()) == 1
    del view
    assert holdings() == []
    with pytest.raises(RuntimeError, match="released"):
        region.create_kv_memoryview()


def test_ranks_that_never_come_are_named(engine: dict[str, Any]) -> None:
    engine = with_backing(engine, "memfd", join_timeout=0.5)
    workers = [SharedOffloadRegion(rank=rank, **engine) for rank in (0, 2)]
    scheduler = SharedOffloadRegion(rank=None, **engine)
    assert scheduler.joined_ranks == {0, 2}
    with pytest.raises(RegionError, match="ranks 1, 3 of 4 did not join"):
        scheduler.require_ranks(4)
    for region in (*workers, scheduler):
        region.cleanup()


@pytest.mark.parametrize("backing", BACKINGS)
def test_a_scheduler_without_workers_is_told(backing: str, engine: dict[str, Any]) -> None:
    with pytest.raises(RegionError, match="none of its workers is on this host"):
        SharedOffloadRegion(rank=None, **with_backing(engine, backing, join_timeout=0.3))


@pytest.mark.parametrize("backing", BACKINGS)
def test_a_late_worker_still_gets_the_memory(
    backing: str,
    engine: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("vllm_tiered_offload.region.seat.LOG_INTERVAL", 0.2)
    monkeypatch.setattr(opening, "WORKER_PATIENCE", 1.5)
    caplog.set_level("INFO")
    engine = with_backing(engine, backing) | {"world_size": 2}
    early = SharedOffloadRegion(rank=0, **engine)
    assert "waiting for rank 1 (" in caplog.text
    assert "rank 0 goes on without them" in caplog.text
    late = SharedOffloadRegion(rank=1, **engine)
    scheduler = SharedOffloadRegion(rank=None, **engine)
    scheduler.require_ranks(2)
    fill(early, 0)
    fill(late, 1)
    assert wrong_slots(scheduler, 2) == []
    for region in (early, late, scheduler):
        region.cleanup()


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_chunks": 13}, "num_chunks 12 here, 13 there|num_chunks 13 here, 12 there"),
        ({"cpu_page_size": 2000}, "slot_bytes .*2000"),
        ({"world_size": 3}, "world_size .*3"),
    ],
)
def test_a_worker_that_expects_another_region_is_refused(
    backing: str, other: dict[str, Any], named: str, engine: dict[str, Any]
) -> None:
    engine = with_backing(engine, backing, join_timeout=0.4)
    first = SharedOffloadRegion(rank=0, **engine)
    with pytest.raises(RegionError, match=named):
        SharedOffloadRegion(rank=1, **(engine | other))
    first.cleanup()


@pytest.mark.parametrize("backing", BACKINGS)
def test_a_rank_joins_once(backing: str, engine: dict[str, Any]) -> None:
    """Two engines that were given the same engine_id."""
    engine = with_backing(engine, backing, join_timeout=0.4)
    first = SharedOffloadRegion(rank=0, **engine)
    with pytest.raises(RegionError, match=r"rank 0 has joined already.*two engines use"):
        SharedOffloadRegion(rank=0, **engine)
    first.cleanup()
    again = SharedOffloadRegion(rank=0, **engine)  # one after the other is fine
    again.cleanup()


@pytest.mark.parametrize("backing", BACKINGS)
def test_engines_with_one_id_at_once_have_regions_of_their_own(
    backing: str, engine: dict[str, Any]
) -> None:
    engine = with_backing(engine, backing) | {"world_size": 1}
    pairs = []
    for _ in range(2):
        worker = SharedOffloadRegion(rank=0, **engine)
        pairs.append((worker, SharedOffloadRegion(rank=None, **engine)))
    rows(pairs[0][0])[0, 0] = 1
    rows(pairs[1][0])[0, 0] = 2
    assert [rows(scheduler)[0, 0] for _, scheduler in pairs] == [1, 2]
    for worker, scheduler in pairs:
        worker.cleanup()
        scheduler.cleanup()


@pytest.mark.parametrize("backing", BACKINGS)
def test_the_replicated_layout_keeps_one_copy(backing: str, engine: dict[str, Any]) -> None:
    engine = with_backing(engine, backing) | {"world_size": 3, "cpu_page_size": ROW}
    made: dict[int, SharedOffloadRegion] = {}

    def open_one(rank: int) -> None:
        made[rank] = SharedOffloadRegion(rank=0, joining_rank=rank, **engine)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fill(made[2], 0)
    assert [wrong_slots(made[rank], 1) for rank in range(3)] == [[], [], []]
    assert made[1].joined_ranks == {0, 1, 2}
    for region in made.values():
        region.cleanup()


@pytest.mark.parametrize("backing", BACKINGS)
def test_workers_alone_end_the_handover(
    backing: str, engine: dict[str, Any], no_leftovers_in_shm: None, tmp_path: Path
) -> None:
    """The CPU-only pool on GPUs: no scheduler comes, and nothing is left open for one."""
    calls = []
    engine = with_backing(engine, backing) | {"world_size": 1}
    region = SharedOffloadRegion(rank=0, barrier=lambda: calls.append(1), **engine)
    assert calls == [1]
    assert list(tmp_path.glob("*/*.sock")) == []
    region.cleanup()


def test_the_barrier_is_called_once_when_the_region_cannot_be_made() -> None:
    calls = []
    with pytest.raises(RegionError, match="not a multiple of the page size"):
        SharedOffloadRegion("bad", 3, 0, ROW + 1, SLOT, lambda: calls.append(1))
    assert calls == [1]


def test_a_barrier_that_fails_releases_the_region(engine: dict[str, Any]) -> None:
    def fail() -> None:
        raise TimeoutError("peer gone")

    with pytest.raises(TimeoutError):
        SharedOffloadRegion(rank=0, barrier=fail, **(engine | {"world_size": 1}))
    assert holdings() == []


def test_on_several_numa_nodes_each_worker_takes_its_own_slots(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(opening.numa, "node_count", lambda: 2)
    monkeypatch.setattr(
        opening.prefault.Populate, "__call__", lambda _, *piece: taken.append(piece)
    )
    monkeypatch.setattr(opening, "WORKER_PATIENCE", 0.01)
    sizes = {"kv_bytes_per_chunk": 4 * ROW, "cpu_page_size": ROW, "num_chunks": 3}
    settings = RegionSettings(huge_pages="off")
    region = SharedOffloadRegion(rank=2, **(engine | sizes | {"settings": settings}))
    assert sorted(taken) == [((4 * row + 2) * ROW, ROW) for row in range(3)]
    region.cleanup()


def test_unpinning_without_vllms_own_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.30 and 0.31 have none; a failure is no reason to keep the memory."""
    torch = pytest.importorskip("torch")
    calls: list[int] = []

    class Runtime:
        def cudaHostUnregister(self, address: int) -> int:
            calls.append(address)
            if address == 2:
                raise RuntimeError("driver is shutting down")
            return 1

    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.cpu.host_register", None)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    pinning.unregister([1, 2, 3])
    assert calls == [3, 2, 1]


def test_the_creators_check_comes_before_the_memory(engine: dict[str, Any]) -> None:
    def refuse(size: int) -> None:
        assert size == ROW * 12
        assert holdings() == []
        raise MemoryError("no room")

    arguments = engine | {"world_size": 1}
    with pytest.raises(MemoryError):
        SharedOffloadRegion(rank=0, creator_memory_check=refuse, **arguments)
    SharedOffloadRegion(rank=0, **arguments).cleanup()  # nothing was left behind


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_chunks": 0}, "empty region"),
        ({"rank": 4}, "slot 4 is outside"),
        ({"rank": 0, "joining_rank": 4}, "rank 4 is not one of 4"),
        ({"cpu_page_size": ROW + 1}, "do not fit"),
        ({"facts": {"x": object()}}, "not JSON"),
        ({"facts": {"x": "y" * (1 << 20)}}, "over 1 MiB"),
    ],
)
def test_impossible_requests_are_refused(
    change: dict[str, Any], named: str, engine: dict[str, Any]
) -> None:
    with pytest.raises(RegionError, match=named):
        SharedOffloadRegion(**({"rank": 0} | engine | change))


def test_settings_are_checked_against_everything_claimed() -> None:
    """A field added to the settings has to be thought about: is it part of the claim?"""
    names = {field.name for field in dataclasses.fields(RegionSettings)}
    assert names == {"backing", "huge_pages", "prefault", "join_timeout"}
