# SPDX-License-Identifier: Apache-2.0
"""Engines made of plain processes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.region_process import RegionProcess

ROW, SLOT, CHUNKS = 16384, 4000, 12


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sockets of a test are its own; children inherit the setting."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def engine() -> dict[str, Any]:
    """Arguments that all four workers and the scheduler of one engine share."""
    return {
        "engine_id": f"test-{uuid.uuid4()}/odd: name " + "x" * 200,
        "num_chunks": CHUNKS,
        "kv_bytes_per_chunk": ROW,
        "cpu_page_size": SLOT,
        "world_size": 4,
    }


@pytest.fixture
def start() -> Iterator[Callable[[], RegionProcess]]:
    """Makes processes that are gone after the test, however it ends."""
    made: list[RegionProcess] = []

    def make() -> RegionProcess:
        made.append(RegionProcess())
        return made[-1]

    yield make
    for process in made:
        process.kill()


def together(processes: list[RegionProcess], engine: dict[str, Any]) -> list[Any]:
    """All processes join at once as ranks 0, 1, ...; returns what each knows."""
    for rank, process in enumerate(processes):
        process.tell("open", rank=rank, facts={"pid": process.pid}, **engine)
    return [process.answer() for process in processes]
