# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters whose weights change under one name and path, and what is kept all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine, Output, prompt, tiering, wait_until
from tests.support.lora import RANK, make_adapter

pytestmark = pytest.mark.engine

PROMPT = prompt(1000, seed=4)
CACHED = 896
READ_BYTES = "vllm:kv_offload_tiering_read_bytes"
WRITE_BYTES = "vllm:kv_offload_tiering_write_bytes"
CHUNK = 128 * 1024  # bytes of a block of the model: 128 tokens
OURS = "TieredOffloadingConnector"


def engine(model: Path, config: Any) -> Engine:
    return Engine(model, config, enable_lora=True, max_lora_rank=RANK)


def ask(running: Engine, adapter: Path | None = None) -> Output:
    lora = {} if adapter is None else {"lora": ["tuned", 1, str(adapter)]}
    return running.generate([PROMPT], max_tokens=8, logprobs=True, **lora)[0]


def read_bytes(running: Engine) -> float:
    return running.metrics().get(READ_BYTES, 0.0)


def test_changed_adapter_is_never_served_and_the_base_model_is(
    tiny_llama: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_llama, seed=1)
    # A pool of 16 chunks: other prompts push the first one out to the disk.
    config = tiering(tmp_path / "root", connector=OURS, cpu_bytes=16 * CHUNK)
    with engine(tiny_llama, config) as first:
        base, old = ask(first), ask(first, adapter)
        assert base.tokens != old.tokens
        wait_until(lambda: first.metrics().get(WRITE_BYTES, 0) >= 14 * CHUNK)
        first.generate([prompt(1900, seed=seed) for seed in (5, 6)], max_tokens=1)
        assert first.reset()
        assert read_bytes(first) == 0
        # Within one process the adapter's chunks come back from the disk.
        again = ask(first, adapter)
        assert (again.tokens, again.cached) == (old.tokens, CACHED)
        assert read_bytes(first) > 0

    make_adapter(adapter, tiny_llama, seed=2)
    with engine(tiny_llama, config) as second:
        new = ask(second, adapter)
        assert (new.cached, read_bytes(second)) == (0, 0)
        assert new.tokens != old.tokens
        kept = ask(second)
        assert (kept.tokens, kept.cached) == (base.tokens, CACHED)
        assert read_bytes(second) > 0


def test_immutable_adapters_are_kept(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_llama, seed=1)
    config = tiering(tmp_path / "root", tier={"lora_adapters_immutable": True})
    with engine(tiny_llama, config) as first:
        before = ask(first, adapter)
        assert before.cached == 0
    with engine(tiny_llama, config) as second:
        after = ask(second, adapter)
        assert (after.tokens, after.cached) == (before.tokens, CACHED)
        assert ask(second).cached == 0


@pytest.mark.slow
def test_vllms_connector_keeps_nothing_with_lora(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_llama, seed=1)
    config = tiering(tmp_path / "root")
    for _ in range(2):
        with engine(tiny_llama, config) as running:
            assert ask(running, adapter).cached == 0
            assert ask(running).cached == 0
            assert read_bytes(running) == 0
            assert "lora_adapters_immutable" in running.log
