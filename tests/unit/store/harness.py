# SPDX-License-Identifier: Apache-2.0
"""What the tests of the store share: buffers, keys, payloads that any process can check."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vllm_tiered_offload.store import ChunkStore, Completion, Namespace, StoreSettings
from vllm_tiered_offload.store.syscalls import Syscalls

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 16 * KIB
FINGERPRINT = "0123456789abcdef" * 2
HERE = Path(__file__).parent


def key(number: int, salt: str = "") -> bytes:
    """A key as vLLM makes them: a 32-byte hash and a group."""
    return hashlib.sha256(f"{salt}{number}".encode()).digest() + bytes(4)


def keys(count: int, start: int = 0, salt: str = "") -> list[bytes]:
    return [key(number, salt) for number in range(start, start + count)]


def payload(of: bytes, size: int = CHUNK) -> bytes:
    """The only right bytes for a key: whoever reads others has found a bug."""
    return hashlib.shake_128(of).digest(size)


def page_aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


class Engine:
    """A store with its rows, driven as a tier drives it. A context manager."""

    def __init__(
        self,
        *roots: Path,
        chunk_bytes: int = CHUNK,
        rows: int = 64,
        namespace: Namespace | None = None,
        syscalls: Syscalls | None = None,
        events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        page_bytes: int = 4096,
        **settings: object,
    ) -> None:
        usual: dict[str, object] = {
            "max_bytes": 64 * MIB,
            "refresh_interval": 0.05,
            "read_threads": 2,
            "io_bytes": MIB,
        }
        if settings.get("mode") == "read":
            usual.pop("max_bytes")
        self.chunk_bytes = chunk_bytes
        self.memory = page_aligned(rows * chunk_bytes)
        self.rows = rows
        self.store = ChunkStore(
            StoreSettings(tuple(roots), **(usual | settings)),  # type: ignore[arg-type]
            namespace or Namespace(FINGERPRINT, {"made by": "a test"}),
            self.memory,
            chunk_bytes,
            syscalls=syscalls,
            events=events,
            clock=clock,
            page_bytes=page_bytes,
        )
        self._job = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.store.shutdown()

    def row(self, number: int) -> memoryview:
        return self.memory[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]

    def start_store(self, wanted: Sequence[bytes], first_row: int = 0) -> int:
        """Submits a store of the right payloads; returns the job."""
        for place, of in enumerate(wanted):
            self.row(first_row + place)[:] = payload(of, self.chunk_bytes)
        self._job += 1
        rows = list(range(first_row, first_row + len(wanted)))
        self.store.submit_store(self._job, list(wanted), rows)
        return self._job

    def put(self, wanted: Sequence[bytes]) -> list[Completion]:
        """Stores the right payloads, as many at a time as there are rows."""
        done: list[Completion] = []
        for start in range(0, len(wanted), self.rows):
            self.start_store(wanted[start : start + self.rows])
            done += self.finish()
        return done

    def start_load(self, wanted: Sequence[bytes]) -> int:
        self.memory[: len(wanted) * self.chunk_bytes] = bytes(len(wanted) * self.chunk_bytes)
        self._job += 1
        self.store.submit_load(self._job, list(wanted), list(range(len(wanted))))
        return self._job

    def get(self, wanted: Sequence[bytes]) -> list[bytes]:
        """Loads; returns the keys that arrived, after checking every byte of each."""
        arrived: list[bytes] = []
        for start in range(0, len(wanted), self.rows):
            part = wanted[start : start + self.rows]
            self.start_load(part)
            (done,) = self.finish()
            assert done.is_load
            good = part if done.ok else list(done.loaded_keys or ())
            for place, of in enumerate(part):
                if of in good:
                    right = payload(of, self.chunk_bytes)
                    assert self.row(place) == right, "wrong bytes served"
            arrived += good
        return arrived

    def finish(self) -> list[Completion]:
        self.store.drain()
        return self.store.take_completions()

    def held(self, wanted: Iterable[bytes]) -> list[bytes]:
        return [of for of in wanted if self.store.contains(of)]

    def serves_all_it_holds(self, wanted: Sequence[bytes]) -> bool:
        """Whether all that look-ups find arrives. An eviction that was under way may take
        some in between, which are then misses; once it is over nothing may be missing."""
        for _ in range(20):
            held = self.held(wanted)
            if self.get(held) == held:
                return True
            time.sleep(0.1)
        return False

    def counter(self, name: str) -> int:
        return sum(root.counters.get(name, 0) for root in self.store.stats().roots)


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Polls; a condition that never comes true is a failure of the test, not a slow machine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen in {seconds} s"
        time.sleep(0.01)


def segments(root: Path) -> list[Path]:
    return sorted((root / "segments").glob("*.seg"))


def disk_usage(root: Path) -> int:
    """As du counts: allocated blocks, directories included."""
    total = 0
    for directory, _, names in os.walk(root):
        for path in (directory, *(f"{directory}/{name}" for name in names)):
            try:
                total += os.lstat(path).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def process(*arguments: object, faults: str = "") -> subprocess.Popen[str]:
    """Starts ``storing_process.py``; it speaks one line a step."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "storing_process.py"), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VTO_FAULTS": faults, "PYTHONPATH": str(HERE)},
    )
