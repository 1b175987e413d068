# SPDX-License-Identifier: Apache-2.0
"""What `plan` reads from a config.json is what a real engine's worker says it sized."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.engine import Engine, tiering
from tests.support.tiny_model import make_deepseek, make_gemma3, make_llama
from vllm_tiered_offload.cli.planning.layers import read_layers
from vllm_tiered_offload.cli.planning.model_config import load_config
from vllm_tiered_offload.cli.planning.numbers import Plan, Request, make_plan

pytestmark = pytest.mark.engine

CPU_BYTES = 48 << 20
SIZED = re.compile(
    r"Sized the CPU pool in worker 0 of 1: (\d+) chunks of (\d+) bytes \((\d+) used, (\d+) pad"
)


def planned(model: Path, block_size: int, blocks_per_chunk: int) -> Plan:
    request = Request(CPU_BYTES, 0, block_size=block_size, blocks_per_chunk=blocks_per_chunk)
    return make_plan(read_layers(load_config(str(model))), request)


@pytest.mark.parametrize(
    ("make", "name", "block_size", "blocks_per_chunk"),
    [
        pytest.param(make_llama, "tiny-llama", 32, 3, id="grouped-query"),
        pytest.param(make_gemma3, "tiny-gemma3", 32, 1, id="hybrid"),
        # vLLM's CPU backend for MLA takes blocks of 16 tokens only.
        pytest.param(make_deepseek, "tiny-deepseek", 16, 1, id="latent"),
    ],
)
def test_a_real_engine_agrees(make, name, block_size, blocks_per_chunk, model_cache):
    model = make(model_cache / name)
    plan = planned(model, block_size, blocks_per_chunk)
    assert plan.model.exact
    config = tiering(None, cpu_bytes=CPU_BYTES, blocks_per_chunk=blocks_per_chunk)
    with Engine(model, config, block_size=block_size) as engine:
        found = SIZED.search(engine.log)
        assert found is not None, engine.log[-2000:]
    chunks, size, used, padding = map(int, found.groups())
    assert chunks == plan.chosen.cpu_chunks
    assert size == plan.chosen.kv_bytes_per_chunk
    assert used == plan.pool.kv_bytes_per_block * blocks_per_chunk
    assert padding == plan.chosen.padding
