# SPDX-License-Identifier: Apache-2.0
"""Real engines killed without warning: the next one starts, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.engine import Engine, prompt, tiering, wait_until

pytestmark = pytest.mark.engine

POOL = 256 * 2**20
KILLS = int(os.environ.get("VTO_ENGINE_KILLS", "1"))
PROMPT = prompt(600, seed=8)


def shared_memory() -> int:
    """Bytes of shared memory in use on this machine, memfds included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")


def ours_in_shm() -> set[str]:
    return {n for n in os.listdir("/dev/shm") if "tiered" in n or "vto" in n or "offload" in n}


def part(engine: Engine, title: str) -> psutil.Process:
    """The engine's process whose title contains `title`, e.g. `EngineCore`."""
    family = psutil.Process(engine.process.pid).children(recursive=True)
    (found,) = (p for p in family if title in " ".join(p.cmdline()))
    return found


def kill(engine: Engine, victim: str) -> None:
    if victim == "everything":
        engine.kill()
        return
    part(engine, "Worker" if victim == "worker" else "EngineCore").send_signal(signal.SIGKILL)
    # vLLM ends the rest by itself; what is then still there is killed.
    engine.kill(grace=20.0)


@pytest.mark.parametrize("backing", ["memfd", "shm"])
def test_restarts_with_a_pinned_engine_id(
    tiny_llama: Path, tmp_path: Path, backing: str
) -> None:
    victims = ["worker", "scheduler", "everything"] * KILLS
    if backing == "shm":
        victims = victims[1:]
    config = tiering(tmp_path / "kv", cpu_bytes=POOL, region_backing=backing)
    config["engine_id"] = f"pinned-{backing}-{os.getpid()}"
    before_files, before_bytes = ours_in_shm(), shared_memory()
    answers = []
    for number, victim in enumerate(victims[:KILLS]):
        engine = Engine(tiny_llama, config, processes=True, log=tmp_path / f"{number}.log")
        try:
            answers.append(engine.generate([PROMPT])[0].tokens)
        finally:
            kill(engine, victim)
        # Other tests' memory may come and go; ours is a quarter of a GiB.
        wait_until(lambda: shared_memory() < before_bytes + POOL // 2, 60.0)
    with Engine(tiny_llama, config) as last:
        answers.append(last.generate([PROMPT])[0].tokens)
    assert ours_in_shm() <= before_files
    assert len(set(map(tuple, answers))) == 1
