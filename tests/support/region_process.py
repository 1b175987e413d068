# SPDX-License-Identifier: Apache-2.0
"""Processes that join a region and do what a test says, and can be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vllm_tiered_offload.region.shared_region import SharedOffloadRegion

_MEMORY = re.compile(r"memfd:vllm-tiered-offload|vllm-tiered-offload-[^/]*/region")
# Forked from a clean process that has everything imported: fast, and without
# the test's own threads and descriptors.
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload([__name__])


def pattern(rank: int, row: int) -> int:
    """What `rank` writes all over its slot of `row`: other in every neighbour."""
    return (rank * 31 + row * 7 + 1) % 127


def rows(region: SharedOffloadRegion) -> Any:
    return np.asarray(region.create_kv_memoryview())


def fill(region: SharedOffloadRegion, rank: int) -> None:
    slot = region.cpu_page_size
    for row, bytes_ in enumerate(rows(region)):
        bytes_[rank * slot : (rank + 1) * slot] = pattern(rank, row)


def wrong_slots(region: SharedOffloadRegion, ranks: int) -> list[tuple[int, int]]:
    """(rank, row) of every slot that does not hold what its rank wrote."""
    slot = region.cpu_page_size
    return [
        (rank, row)
        for row, bytes_ in enumerate(rows(region))
        for rank in range(ranks)
        if not (bytes_[rank * slot : (rank + 1) * slot] == pattern(rank, row)).all()
    ]


def holdings(pid: int | str = "self") -> list[str]:
    """What of the region's memory a process has: mappings and descriptors."""
    found = []
    with open(f"/proc/{pid}/maps") as maps:
        found += [line for line in maps if _MEMORY.search(line)]
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if _MEMORY.search(target):
                found.append(target)
    return found


def eventually(what: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether `what` comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.02)
    return what()


def _forked_helper() -> int:
    """A helper process forked without exec, as torch and vLLM make them."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    region: SharedOffloadRegion | None = None
    while True:
        command, arguments = connection.recv()
        try:
            if command == "open":
                region = SharedOffloadRegion(**arguments)
                answer: Any = region.rank_facts
            elif command == "fork":
                answer = _forked_helper()
            else:
                assert region is not None
                answer = {
                    "fill": lambda: fill(region, **arguments),
                    "wrong": lambda: wrong_slots(region, **arguments),
                    "describe": region.describe,
                    "cleanup": region.cleanup,
                }[command]()
            connection.send((True, answer))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))


class RegionProcess:
    """One process; `tell` starts a command, `answer` waits for it."""

    def __init__(self) -> None:
        self._connection, theirs = _forkserver.Pipe()
        self._process = _forkserver.Process(
            target=_serve, args=(theirs, dict(os.environ)), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, command: str, **arguments: Any) -> None:
        self._connection.send((command, arguments))

    def answer(self, timeout: float = 30.0) -> Any:
        """The command's result; raises `RuntimeError` with its error, `TimeoutError`."""
        if not self._connection.poll(timeout):
            raise TimeoutError(f"no answer within {timeout} s")
        good, answer = self._connection.recv()
        if not good:
            raise RuntimeError(answer)
        return answer

    def do(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def has_answered(self, within: float = 0.0) -> bool:
        return self._connection.poll(within)

    def is_inside(self) -> bool:
        """Whether it comes to hold the memory, and then waits for the others."""
        return eventually(lambda: bool(holdings(self.pid))) and not self.has_answered(0.2)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """kill -9, and wait until the kernel has taken back everything."""
        self._process.kill()
        self._process.join()
