# SPDX-License-Identifier: Apache-2.0
"""Small roots with real chunks in them, for tests of what looks at a root from outside."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_tiered_offload.store import ChunkStore, Namespace, StoreSettings

CHUNK = 64 << 10
ROWS = 16
SEGMENT = 1 << 20
SHARED = Namespace("ab" * 20, {"weights": {"value": "sha256:1", "meaning": "weights"}})
PRIVATE = Namespace("cd" * 20, {"private": {"value": "random", "meaning": "private"}}, True)


def key(number: int) -> bytes:
    """A key as vLLM makes them: a hash and a group index."""
    return hashlib.sha256(b"%d" % number).digest() + bytes(4)


@contextmanager
def open_store(
    root: Path, namespace: Namespace = SHARED, max_bytes: int = 64 << 20
) -> Iterator[ChunkStore]:
    """A store over rows filled with bytes of their own."""
    memory = memoryview(mmap.mmap(-1, CHUNK * ROWS))
    for row in range(ROWS):
        memory[row * CHUNK : (row + 1) * CHUNK] = bytes([row + 1]) * CHUNK
    settings = StoreSettings((root,), max_bytes=max_bytes, refresh_interval=0.05)
    store = ChunkStore(settings, namespace, memory, CHUNK)
    try:
        yield store
    finally:
        assert store.shutdown()


def fill(store: ChunkStore, numbers: Sequence[int]) -> None:
    """Stores chunks by number and waits until they are written."""
    for start in range(0, len(numbers), ROWS):
        part = numbers[start : start + ROWS]
        store.submit_store(start, [key(number) for number in part], range(len(part)))
    store.drain()
    store.take_completions()


def make_root(
    root: Path, chunks: int, namespace: Namespace = SHARED, max_bytes: int = 64 << 20
) -> None:
    """A root with so many chunks, closed again."""
    with open_store(root, namespace, max_bytes) as store:
        fill(store, range(chunks))


def damage(path: str, offset: int) -> None:
    """Flips the bits of one byte."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))
