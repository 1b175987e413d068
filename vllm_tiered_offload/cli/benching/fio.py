# SPDX-License-Identifier: Apache-2.0
"""fio on the same directory with the same block size: what the disk can do."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from vllm_tiered_offload.cli.benching.measure import BenchError, Measure

_FILE = 256 << 20
_DEPTH = 16
_DIRECTIONS = {"store": "write", "load": "read"}


def has_fio() -> bool:
    return shutil.which("fio") is not None


def measure_fio(
    place: Path, chunk_bytes: int, total: int, *, direct: bool
) -> Iterator[Measure]:
    """Preallocated files of 256 MiB, written once in order and read back.

    Raises:
        BenchError: fio failed; its own last line.
    """
    for direction, words in _DIRECTIONS.items():
        document = _run(place, words, chunk_bytes, total, direct)
        found = document["jobs"][0]
        moved = found[words]["io_bytes"]
        seconds = max(found[words]["runtime"], 1) / 1000
        share = (found["usr_cpu"] + found["sys_cpu"]) / 100
        cpu = share * found["job_runtime"] / 1000
        yield Measure(
            "fio", direction, chunk_bytes, moved / seconds / 1e9, cpu / moved * 1e9, direct
        )


def _run(place: Path, words: str, chunk_bytes: int, total: int, direct: bool) -> dict:  # type: ignore[type-arg]
    blocks = max(1, min(_FILE, total) // chunk_bytes)
    files = max(1, total // (blocks * chunk_bytes))
    command = [
        "fio",
        "--name=bench",
        f"--directory={place}",
        f"--rw={words}",
        f"--bs={chunk_bytes}",
        f"--direct={int(direct)}",
        "--ioengine=libaio",
        f"--iodepth={_DEPTH}",
        "--thread",
        "--fallocate=native",
        f"--nrfiles={files}",
        f"--filesize={blocks * chunk_bytes}",
        f"--size={files * blocks * chunk_bytes}",
        "--file_service_type=sequential",
        f"--end_fsync={int(not direct)}",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise BenchError(f"fio: {lines[-1] if lines else f'exit status {done.returncode}'}")
    document = json.loads(done.stdout[done.stdout.index("{") :])
    assert isinstance(document, dict)
    return document
