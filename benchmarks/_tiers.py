# SPDX-License-Identifier: Apache-2.0
"""The contestants: secondary tiers driven as vLLM's scheduler drives them, and fio."""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.tier import job, make_config, make_spec, request

MIB = 1 << 20
SEGMENT_BYTES = 256 * MIB  # and the length of fio's files
IO_BYTES = 16 * MIB  # in one call of ours
POLL_SECONDS = 0.005  # a fast engine step; polling itself costs CPU
SLICE_SECONDS = 100e-6
SLICES_PER_POLL = 20


@dataclass
class Transfer:
    """One direction of one round. CPU is the process's, user and system, all threads."""

    bytes: int
    seconds: float
    cpu_seconds: float
    submit_seconds: float = 0.0  # inside submit_store or submit_load
    slices: list[float] = field(default_factory=list)  # seconds each, of a busy main thread

    @property
    def gb_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    @property
    def cpu_per_gb(self) -> float:
        return self.cpu_seconds / (self.bytes / 1e9)


class Rows:
    """The CPU tier's rows: page-aligned, shared as the region is, filled with noise."""

    def __init__(self, count: int, chunk_bytes: int) -> None:
        self.count, self.chunk_bytes = count, chunk_bytes
        self._mapping = mmap.mmap(-1, count * chunk_bytes)
        flat = np.frombuffer(self._mapping, dtype=np.uint8)
        self.table: npt.NDArray[np.uint8] = flat.reshape(count, chunk_bytes)
        rng = np.random.default_rng(0)
        for row in self.table:
            row[:] = np.frombuffer(rng.bytes(chunk_bytes), np.uint8)
        self._sums = self._checksums()

    def wipe(self) -> None:
        self.table[:] = 0

    def require_intact(self, who: str) -> None:
        wrong = int((self._checksums() != self._sums).sum())
        if wrong:
            raise SystemExit(f"{who}: {wrong} of {self.count} chunks came back wrong")

    def _checksums(self) -> npt.NDArray[np.uint64]:
        words = self.table.view(np.uint64)
        return np.fromiter((row.sum() for row in words), np.uint64, self.count)


def make_ours(root: Path, rows: Rows, readers: int, writers: int) -> Any:
    """Our tier through vLLM's interface; its store queue takes everything at once."""
    from vllm_tiered_offload.fs_tier.manager import ODirectFsTier

    total = rows.table.nbytes
    config = {
        "root_dir": str(root),
        "max_bytes": max(130 * SEGMENT_BYTES, 2 * total),
        "store_queue_bytes": 2 * total,
        "io_bytes": IO_BYTES,
        "n_read_threads": readers,
        "n_write_threads": writers,
        "cache_namespace": "benchmark",
    }
    spec = _spec(rows, {"type": "odirect_fs", **config})
    return ODirectFsTier(spec, memoryview(rows.table), "odirect_fs", None, **config)


def make_vllm_fs(root: Path, rows: Rows) -> Any:
    """vLLM's own fs tier, with its own default of 16 threads of each kind."""
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    spec = _spec(rows, {"type": "fs", "root_dir": str(root)})
    return FileSystemTierManager(spec, memoryview(rows.table), "fs", str(root))


def _spec(rows: Rows, tier: dict[str, Any]) -> Any:
    return make_spec(make_config([tier], chunks=rows.count, page=rows.chunk_bytes))


class TierRun:
    """One fresh tier over `root` and the jobs that fill and empty it.

    Args:
        jobs: the keys of each job, in prefix order; rows follow in the same order.
        busy: keep the main thread busy in 100 us slices while the tier works, as a scheduler
            would be, instead of sleeping between polls.
    """

    def __init__(self, tier: Any, rows: Rows, jobs: list[list[Any]], busy: bool) -> None:
        self.tier, self._rows, self._jobs = tier, rows, jobs
        self._wait = self._spin if busy else self._sleep
        self._spins = calibrate_spins() if busy else 0
        self._next_job = 0

    def store(self) -> Transfer:
        return self._transfer(self.tier.submit_store, load=False)

    def load(self) -> Transfer:
        """Every chunk back to its row, which is checked."""
        self._rows.wipe()
        measured = self._transfer(self.tier.submit_load, load=True)
        self._rows.require_intact(type(self.tier).__name__)
        return measured

    def lookup_seconds_per_key(self) -> float:
        """A scan over all keys, as a scheduler makes it for a prompt; all must be hits."""
        from vllm.v1.kv_offload.base import LookupResult

        context, keys = request("lookup"), [key for job in self._jobs for key in job]
        self._await_hits(keys, context)
        keys = [type(key)(bytes(bytearray(key))) for key in keys]  # no hash in them yet
        lookup, began = self.tier.lookup, time.perf_counter()
        results = [lookup(key, context) for key in keys]
        took = time.perf_counter() - began
        if set(results) != {LookupResult.HIT}:
            raise SystemExit(f"{type(self.tier).__name__}: stored chunks are not found")
        return took / len(keys)

    def _await_hits(self, keys: list[Any], context: Any) -> None:
        """vLLM's tier answers a look-up one step later; ours at once."""
        from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

        deadline = time.monotonic() + 60
        while LookupResult.RETRY in [self.tier.lookup(key, context) for key in keys]:
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(POLL_SECONDS)
            if time.monotonic() > deadline:
                raise SystemExit(f"{type(self.tier).__name__}: look-ups do not end")

    def _transfer(self, submit: Callable[[Any], None], *, load: bool) -> Transfer:
        jobs = list(self._make_jobs(load))
        cpu, began = cpu_seconds(), time.perf_counter()
        for one in jobs:
            submit(one)
        submitted = time.perf_counter() - began
        slices = self._wait(len(jobs))
        seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        return Transfer(self._rows.table.nbytes, seconds, cpu, submitted, slices)

    def _make_jobs(self, load: bool) -> Iterator[Any]:
        row = 0
        for keys in self._jobs:
            positions = {key: 16 * (at + 1) for at, key in enumerate(keys)}
            rows = range(row, row + len(keys))
            context = request(f"request {self._next_job}", positions)
            yield job(self._next_job, keys, list(rows), load=load, context=context)
            self._next_job += 1
            row += len(keys)

    def _collect(self) -> int:
        results = list(self.tier.get_finished_jobs())
        if not all(result.success for result in results):
            raise SystemExit(f"{type(self.tier).__name__}: a job failed")
        return len(results)

    def _sleep(self, count: int) -> list[float]:
        while count := count - self._collect():
            time.sleep(POLL_SECONDS)
        return []

    def _spin(self, count: int) -> list[float]:
        slices: list[float] = []
        while count := count - self._collect():
            for _ in range(SLICES_PER_POLL):
                began = time.perf_counter()
                spin(self._spins)
                slices.append(time.perf_counter() - began)
        return slices


def spin(count: int) -> None:
    """Interpreter work; a thread that holds the GIL or the core makes it take longer."""
    for _ in range(count):
        pass


def calibrate_spins() -> int:
    """How many turns take 100 us when nothing else runs: the fastest of many tries."""
    turns, fastest = 2000, float("inf")
    for _ in range(200):
        began = time.perf_counter()
        spin(turns)
        fastest = min(fastest, time.perf_counter() - began)
    return int(turns * SLICE_SECONDS / fastest)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def has_fio() -> bool:
    return shutil.which("fio") is not None


def run_fio(root: Path, direction: str, chunk_bytes: int, total: int, calls: int) -> Transfer:
    """fio on the same layout: files of a segment's length, preallocated, written once.

    `direction` "write" makes the files and "read" reads them; both use one thread, direct
    I/O, a block of one chunk, and as many bytes in flight as so many calls of ours.
    """
    depth = max(1, calls * IO_BYTES // chunk_bytes)
    files = -(-total // SEGMENT_BYTES)
    blocks = max(1, total // files // chunk_bytes)
    command = (
        f"fio --name=bench --directory={root} --rw={direction} --bs={chunk_bytes} --direct=1 "
        f"--ioengine=libaio --iodepth={depth} --thread --fallocate=native --nrfiles={files} "
        f"--filesize={blocks * chunk_bytes} --size={files * blocks * chunk_bytes} "
        "--file_service_type=sequential --refill_buffers=0 --end_fsync=0 --output-format=json"
    )
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"fio: {done.stderr.strip() or done.stdout.strip()}")
    measured = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    seconds = measured[direction]["runtime"] / 1000
    cpu = (measured["usr_cpu"] + measured["sys_cpu"]) / 100 * measured["job_runtime"] / 1000
    return Transfer(measured[direction]["io_bytes"], seconds, cpu)


def fresh_keys(count: int) -> list[Any]:
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(os.urandom(32), 0) for _ in range(count)]


def idle_slices(spins: int, count: int = 5000) -> list[float]:
    """Slices with nothing beside them: what the machine itself adds."""
    slices = []
    for _ in range(count):
        began = time.perf_counter()
        spin(spins)
        slices.append(time.perf_counter() - began)
    return slices
