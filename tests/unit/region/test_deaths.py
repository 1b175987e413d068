# SPDX-License-Identifier: Apache-2.0
"""kill -9 of any process at any time: the next start succeeds and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.region_process import RegionProcess, eventually, holdings
from tests.unit.region.conftest import together
from vllm_tiered_offload.region.file_place import SHM
from vllm_tiered_offload.region.settings import RegionSettings

Start = Callable[[], RegionProcess]
BACKINGS = ["memfd", "shm"]
BIG = {"num_chunks": 64, "kv_bytes_per_chunk": 4 << 20, "cpu_page_size": 1 << 20}


def with_backing(engine: dict[str, Any], backing: str, **more: Any) -> dict[str, Any]:
    return engine | {"settings": RegionSettings(backing=backing, **more)}


def shmem_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


def shm_directories() -> list[str]:
    return [n for n in os.listdir(SHM) if n.startswith("vllm-tiered-offload-")]


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("victims", ["all", "creator", "joiner", "scheduler"])
def test_an_engine_starts_again_after_a_kill(
    victims: str, backing: str, engine: dict[str, Any], start: Start
) -> None:
    """With a pinned engine_id; the survivors of a partial kill follow later."""
    engine = with_backing(engine, backing) | {"world_size": 2}
    before = shm_directories()
    for generation in range(3):
        workers, scheduler = [start(), start()], start()
        together(workers, engine)
        assert set(scheduler.do("open", rank=None, **engine)) == {0, 1}
        for rank, worker in enumerate(workers):
            worker.do("fill", rank=rank)
        assert scheduler.do("wrong", ranks=2) == [], f"generation {generation}"
        # All have it: no name is left that a kill could leave behind.
        assert shm_directories() == before
        chosen = {"creator": workers[:1], "joiner": workers[1:], "scheduler": [scheduler]}
        for process in chosen.get(victims, [*workers, scheduler]):
            process.kill()


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("last", [0, 1])
def test_an_engine_killed_while_starting_does_not_hinder_the_next(
    last: int, backing: str, engine: dict[str, Any], start: Start
) -> None:
    """Killed with one rank missing: its name is still there for the next one to find."""
    engine = with_backing(engine, backing) | {"world_size": 2}
    before = shm_directories()
    first = start()
    first.tell("open", rank=last, **engine)
    assert first.is_inside()
    first.kill()
    workers = [start(), start()]
    assert all(set(known) == {0, 1} for known in together(workers, engine))
    scheduler = start()
    assert set(scheduler.do("open", rank=None, **engine)) == {0, 1}
    assert shm_directories() == before


@pytest.mark.parametrize("backing", BACKINGS)
def test_a_generation_starts_while_the_last_one_is_dying(
    backing: str, engine: dict[str, Any], start: Start
) -> None:
    """The old creator lives on for a while and one of the new workers falls in with it."""
    engine = with_backing(engine, backing) | {"world_size": 3}
    old = [start(), start()]
    for rank, process in enumerate(old):
        process.tell("open", rank=rank, **engine)
    assert all(process.is_inside() for process in old)

    new = [start() for _ in range(3)]
    for rank in (0, 1):  # refused for now: the old ones have these ranks
        new[rank].tell("open", rank=rank, facts={"new": rank}, **engine)
    assert not new[0].has_answered(0.5)
    for process in old:
        process.kill()
    new[2].tell("open", rank=2, facts={"new": 2}, **engine)
    for process in new:
        assert set(process.answer()) == {0, 1, 2}
    scheduler = start()
    assert scheduler.do("open", rank=None, **engine) == {r: {"new": r} for r in range(3)}
    for rank, process in enumerate(new):
        process.do("fill", rank=rank)
    assert scheduler.do("wrong", ranks=3) == []


def test_joiners_choose_anew_when_the_creator_dies(
    engine: dict[str, Any], start: Start
) -> None:
    """Killed after it gave the memory to two of four: they leave it and make another."""
    creator, *others = [start() for _ in range(4)]
    creator.tell("open", rank=0, **engine)
    assert creator.is_inside()
    for rank in (1, 2):
        others[rank - 1].tell("open", rank=rank, **engine)
        assert others[rank - 1].is_inside()
    creator.kill()
    again = start()
    again.tell("open", rank=0, **engine)
    others[2].tell("open", rank=3, **engine)
    members = [again, *others]
    for process in members:
        assert set(process.answer()) == {0, 1, 2, 3}
    for rank, process in enumerate(members):
        process.do("fill", rank=rank)
    assert [process.do("wrong", ranks=4) for process in members] == [[]] * 4


def test_joiners_outlast_a_creator_that_hangs_and_is_killed(
    engine: dict[str, Any], start: Start, runtime_directory: Path
) -> None:
    engine = engine | {"world_size": 2}
    creator, joiner = start(), start()
    creator.tell("open", rank=0, **engine)
    assert eventually(lambda: list(runtime_directory.glob("*/*.sock")) != [])
    creator.pause()  # listens, but never answers
    joiner.tell("open", rank=1, **engine)
    assert not joiner.has_answered(0.5)
    creator.kill()
    again = start()
    again.tell("open", rank=0, **engine)
    assert set(joiner.answer()) == set(again.answer()) == {0, 1}


def test_a_creator_that_never_answers_is_an_error(engine: dict[str, Any], start: Start) -> None:
    settings = RegionSettings(join_timeout=1.0)
    engine = engine | {"world_size": 2, "settings": settings}
    creator, joiner = start(), start()
    creator.tell("open", rank=0, **(engine | {"settings": RegionSettings()}))
    assert creator.is_inside()
    creator.pause()
    with pytest.raises(RuntimeError, match=r"does not answer for 1 s.*region_join_timeout"):
        joiner.do("open", rank=1, **engine)


@pytest.mark.parametrize("backing", BACKINGS)
def test_a_rank_that_dies_makes_room_for_its_successor(
    backing: str, engine: dict[str, Any], start: Start
) -> None:
    engine = with_backing(engine, backing) | {"world_size": 3}
    first, second, third = start(), start(), start()
    first.tell("open", rank=0, **engine)
    assert first.is_inside()
    second.tell("open", rank=1, **engine)
    assert second.is_inside()
    second.kill()
    successor = start()
    successor.tell("open", rank=1, **engine)
    third.tell("open", rank=2, **engine)
    for process in (first, successor, third):
        assert set(process.answer()) == {0, 1, 2}


def test_a_scheduler_learns_that_a_worker_died_after_joining(
    engine: dict[str, Any], start: Start
) -> None:
    engine = with_backing(engine, "memfd", join_timeout=1.0) | {"world_size": 2}
    workers = [start(), start()]
    together(workers, engine)
    creator_pid = next(p.pid for p in workers if holds_listener(p))
    victim = next(p for p in workers if p.pid != creator_pid)
    victim.kill()
    survivor = workers[1 - workers.index(victim)]
    known = start().do("open", rank=None, **engine)
    assert set(known) == {workers.index(survivor)}


def holds_listener(process: RegionProcess) -> bool:
    """Whether the process serves the region: it keeps the descriptor for others."""
    return any(
        "maps" not in held and held.startswith("/memfd") for held in holdings(process.pid)
    )


@pytest.mark.parametrize("backing", BACKINGS)
def test_all_memory_comes_back(backing: str, engine: dict[str, Any], start: Start) -> None:
    engine = with_backing(engine, backing) | BIG | {"world_size": 2}
    size = BIG["num_chunks"] * BIG["kv_bytes_per_chunk"]
    before = shmem_bytes()
    for _ in range(3):
        workers, scheduler = [start(), start()], start()
        together(workers, engine)
        scheduler.do("open", rank=None, **engine)
        assert eventually(lambda: shmem_bytes() > before + size // 2)  # pre-faulted
        for process in (scheduler, *workers):
            process.kill()
        assert eventually(lambda: shmem_bytes() < before + size // 2)


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("when", ["waiting for others", "complete"])
def test_a_forked_helper_that_outlives_the_engine_holds_nothing(
    when: str, backing: str, engine: dict[str, Any], start: Start
) -> None:
    complete = when == "complete"
    settings = {"join_timeout": 600 if complete else 0.2}
    engine = with_backing(engine, backing, **settings) | {"world_size": 1 if complete else 2}
    worker = start()
    worker.do("open", rank=0, **engine)
    if complete:
        start().do("open", rank=None, **engine)
    assert holdings(worker.pid)
    helper = worker.do("fork")
    try:
        assert eventually(lambda: holdings(helper) == [])
        worker.kill()
        # The engine's name is free again: the helper keeps no rank and no socket.
        again = start()
        again.tell("open", rank=0, **engine)
        assert set(again.answer(5)) == {0}
    finally:
        os.kill(helper, signal.SIGKILL)


def test_what_a_dead_engine_left_is_swept(
    engine: dict[str, Any], start: Start, runtime_directory: Path
) -> None:
    """By the start of any other engine, with either backing."""
    before = set(shm_directories())
    dead, dead_too = start(), start()
    dead.tell("open", rank=0, **with_backing(engine, "shm"))
    dead_too.tell("open", rank=0, **(engine | {"engine_id": "dead too"}))
    assert dead.is_inside()
    assert dead_too.is_inside()
    assert len(set(shm_directories()) - before) == 1
    assert len(list(runtime_directory.glob("*/*.sock"))) == 1
    dead.kill()
    dead_too.kill()

    living = start()
    living.do("open", rank=0, **(engine | {"engine_id": "living", "world_size": 1}))
    assert set(shm_directories()) <= before
    assert len(list(runtime_directory.glob("*/*.sock"))) == 1  # the living one's


@pytest.mark.slow
def test_kills_at_random_times(engine: dict[str, Any], start: Start) -> None:
    """For `VTO_STRESS_SECONDS`: a pinned engine_id, all processes killed anywhere."""
    seconds = float(os.environ.get("VTO_STRESS_SECONDS", "20"))
    end = time.monotonic() + seconds
    generation = 0
    while time.monotonic() < end:
        arguments = with_backing(engine, BACKINGS[generation % 2]) | {"world_size": 3}
        workers = [start() for _ in range(3)]
        for rank, worker in enumerate(workers):
            worker.tell("open", rank=rank, **arguments)
        time.sleep((generation * 37 % 100) / 100)
        for worker in workers[: generation % 4]:
            worker.kill()
        if generation % 4 == 0:
            for worker in workers:
                assert set(worker.answer()) == {0, 1, 2}
        for worker in workers:
            worker.kill()
        generation += 1
    fresh = [start() for _ in range(4)]
    assert all(set(known) == {0, 1, 2, 3} for known in together(fresh, engine))
