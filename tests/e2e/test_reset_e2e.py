# SPDX-License-Identifier: Apache-2.0
"""`reset_prefix_cache(reset_connector=True)`: nothing from before is served after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine import Engine, Output, prompt, tiering, wait_until

pytestmark = pytest.mark.engine

BEFORE, AFTER = prompt(1000, seed=21), prompt(1000, seed=22)
STORED_CHUNKS = "vllm:kv_offload_odirect_stored_chunks"
CHUNKS = 7  # whole chunks of 128 tokens in such a prompt


def ask(engine: Engine, tokens: list[int]) -> Output:
    return engine.generate([tokens])[0]


def stored(engine: Engine) -> float:
    engine.generate([[5, 6, 7]])  # in one process vLLM only steps for requests
    return engine.metrics().get(STORED_CHUNKS, 0.0)


def test_reset_in_memory_and_on_disk(tiny_llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with Engine(tiny_llama, tiering(root)) as engine:
        cold = ask(engine, BEFORE)
        wait_until(lambda: stored(engine) == CHUNKS)
        assert engine.reset(connector=True)
        again = ask(engine, BEFORE)
        assert again.cached == 0  # neither the pool nor the disk
        assert again.tokens == cold.tokens
        fresh = ask(engine, AFTER)
        wait_until(lambda: stored(engine) == 3 * CHUNKS)
        # What came after the reset serves this process, from the pool ...
        assert engine.reset()
        assert ask(engine, AFTER).cached == CHUNKS * 128
    with Engine(tiny_llama, tiering(root)) as following:
        # ... and no other: the weights may have changed under the fingerprint.
        later = ask(following, AFTER)
        assert later.cached == 0
        assert later.tokens == fresh.tokens
        # What came before it was stored under weights that are known.
        assert ask(following, BEFORE).cached == CHUNKS * 128


def test_keep_serves_on(tiny_llama: Path, tmp_path: Path) -> None:
    config = tiering(tmp_path / "kv", tier={"on_reset": "keep"})
    with Engine(tiny_llama, config) as engine:
        ask(engine, BEFORE)
        wait_until(lambda: stored(engine) == CHUNKS)
        assert engine.reset(connector=True)
        assert ask(engine, BEFORE).cached == CHUNKS * 128
