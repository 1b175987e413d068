# SPDX-License-Identifier: Apache-2.0
"""Files damaged under a running engine: the right tokens, no hanging, and it heals."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.engine import Engine, Output, prompt, tiering, wait_until

pytestmark = pytest.mark.engine

CHUNK = 128  # tokens: vLLM's block on CPUs
CHUNK_BYTES = 128 * 1024  # of the tiny Llama
LENGTH = 10  # chunks of every prompt; the pool holds as many
PAGE = 4096
STORED_BYTES = "vllm:kv_offload_odirect_stored_bytes"
RESIDENT = "vllm:kv_offload_odirect_resident_chunks"
CORRUPT = "vllm:kv_offload_odirect_checksum_failures"


def segments(root: Path) -> list[Path]:
    return sorted((root / "segments").iterdir())


def flip_bytes(root: Path) -> None:
    """One byte in every page but the first: no chunk and no record survives."""
    for path in segments(root):
        with path.open("r+b") as file:
            for offset in range(PAGE, path.stat().st_size, PAGE):
                at = offset + random.Random(offset).randrange(PAGE)
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 0x40]), at)


def truncate(root: Path) -> None:
    for path in segments(root):
        os.truncate(path, 64 * 1024)


def remove(root: Path) -> None:
    for path in segments(root):
        path.unlink()


class Run:
    """One engine whose pool is too small to hide the disk."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.fillers = 0

    def ask(self, tokens: list[int], *, stores: bool = False) -> Output:
        """Generate with vLLM's own prefix cache empty; wait for what it stores."""
        assert self.engine.reset()
        before = self.engine.metrics().get(STORED_BYTES, 0.0)
        (output,) = self.engine.generate([tokens])
        if stores:
            enough = before + LENGTH * CHUNK_BYTES
            wait_until(lambda: self.metric(STORED_BYTES) >= enough)
        return output

    def metric(self, name: str) -> float:
        self.engine.generate([[5, 6, 7]])  # in one process vLLM only steps for requests
        return self.engine.metrics().get(name, 0.0)

    def empty_the_pool(self) -> None:
        self.fillers += 1
        self.ask(prompt(LENGTH * CHUNK + 40, seed=1000 + self.fillers), stores=True)


def test_damage_costs_a_recomputation_and_nothing_else(
    tiny_llama: Path, tmp_path: Path
) -> None:
    root = tmp_path / "kv"
    config = tiering(
        root,
        cpu_bytes=LENGTH * CHUNK_BYTES,
        tier={"max_bytes": "256MiB"},
        pin_share=1.0,
        store_headroom=0.0,
    )
    with Engine(tiny_llama, config) as engine:
        run = Run(engine)
        for seed, damage in enumerate((flip_bytes, truncate, remove)):
            tokens = prompt(LENGTH * CHUNK + 40, seed=seed)
            cold = run.ask(tokens, stores=True)
            assert cold.cached == 0
            run.empty_the_pool()
            damage(root)
            if damage is remove:
                # Until the next refresh a removed file is still open, and rightly served.
                wait_until(lambda: run.metric(RESIDENT) == 0)
            hurt = run.ask(tokens, stores=True)
            assert hurt.tokens == cold.tokens
            assert hurt.cached == 0
            run.empty_the_pool()
            healed = run.ask(tokens)
            assert healed.tokens == cold.tokens
            assert healed.cached == LENGTH * CHUNK
        assert engine.metrics()[CORRUPT] >= LENGTH
