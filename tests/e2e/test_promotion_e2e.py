# SPDX-License-Identifier: Apache-2.0
"""Prefixes larger than the CPU pool, and more of them than it holds, on the real engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.engine import Engine, Output, prompt, tiering

pytestmark = pytest.mark.engine

CHUNK = 128  # tokens: vLLM's block on CPUs
CHUNK_BYTES = 128 * 1024  # of the tiny Llama
POOL = 8  # chunks
READ_BYTES = "vllm:kv_offload_tiering_read_bytes"

ONE_MORE = prompt((POOL + 1) * CHUNK + 40, seed=1)
THREE_TIMES = prompt(3 * POOL * CHUNK + 40, seed=2)
CROWD = [prompt(6 * CHUNK + 40, seed=10 + i) for i in range(4)]
EVERYTHING = [ONE_MORE, THREE_TIMES, *CROWD]


def read_by(engine: Engine, prompts: list[list[int]]) -> tuple[list[Output], float]:
    """Outputs, and bytes read from the disk for them."""
    before = engine.metrics().get(READ_BYTES, 0.0)
    outputs = engine.generate(prompts)
    return outputs, engine.metrics()[READ_BYTES] - before


@pytest.fixture(scope="module")
def stored(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Output]]:
    """A directory that holds every prompt, and the tokens of an engine that computed them."""
    root = tmp_path_factory.mktemp("promotions") / "kv"
    with Engine(tiny_llama, tiering(root)) as engine:
        outputs = [engine.generate([p])[0] for p in EVERYTHING]
    assert all(output.cached == 0 for output in outputs)
    return root, outputs


def test_larger_than_the_pool_and_more_than_the_pool_holds(
    tiny_llama: Path, stored: tuple[Path, list[Output]]
) -> None:
    root, expected = stored
    config = tiering(
        root,
        cpu_bytes=POOL * CHUNK_BYTES,
        tier={"mode": "read"},
        pin_share=1.0,
        store_headroom=0.0,
        patience=30.0,
    )
    with Engine(tiny_llama, config) as engine:
        for i, tokens in enumerate([ONE_MORE, THREE_TIMES]):
            (output,), read = read_by(engine, [tokens])
            assert output.tokens == expected[i].tokens
            assert output.cached == POOL * CHUNK
            assert read == POOL * CHUNK_BYTES

        # All at once: six chunks each, the pool holds eight. Each waits for its turn.
        outputs, read = read_by(engine, CROWD)
        assert [o.tokens for o in outputs] == [o.tokens for o in expected[2:]]
        assert [o.cached for o in outputs] == [6 * CHUNK] * len(CROWD)
        assert read == 6 * len(CROWD) * CHUNK_BYTES
        waits = {
            metric["labels"]["outcome"]: metric["value"]
            for metric in engine.labelled_metrics()
            if metric["name"] == "vllm:kv_offload_pool_waits"
        }
        assert waits == {"in_time": len(CROWD) - 1, "out_of_patience": 0, "gone": 0}


def test_the_default_share_and_no_patience(
    tiny_llama: Path, stored: tuple[Path, list[Output]]
) -> None:
    root, expected = stored
    config = tiering(root, cpu_bytes=POOL * CHUNK_BYTES, tier={"mode": "read"}, patience=0)
    with Engine(tiny_llama, config) as engine:
        (output,), read = read_by(engine, [THREE_TIMES])
        assert output.tokens == expected[1].tokens
        assert 0 < output.cached < POOL * CHUNK
        assert read == output.cached // CHUNK * CHUNK_BYTES
        outputs, read = read_by(engine, CROWD)
        assert [o.tokens for o in outputs] == [o.tokens for o in expected[2:]]
        assert min(o.cached for o in outputs) == 0
        assert read <= 6 * len(CROWD) * CHUNK_BYTES


def test_sliding_windows_larger_than_the_pool(tiny_gemma3: Path, tmp_path: Path) -> None:
    # vLLM stores windows only where a prompt has ended: after 8 chunks and after 20.
    longer = prompt(20 * CHUNK + 40, seed=3)
    turns = [longer[: 8 * CHUNK + 40], longer]
    stranger = prompt(20 * CHUNK + 40, seed=4)
    root = tmp_path / "kv"
    with Engine(tiny_gemma3, tiering(root)) as engine:
        expected = [engine.generate([p])[0].tokens for p in (*turns, stranger)]
        chunk_bytes = _chunk_bytes(engine)
    config = tiering(
        root,
        cpu_bytes=12 * chunk_bytes,
        tier={"mode": "read"},
        pin_share=1.0,
        store_headroom=0.0,
    )
    with Engine(tiny_gemma3, config) as engine:
        (output,), read = read_by(engine, [longer])
        assert output.tokens == expected[1]
        assert output.cached == 8 * CHUNK
        assert read <= 12 * chunk_bytes
        (output,), read = read_by(engine, [stranger])
        assert output.tokens == expected[2]
        assert (output.cached, read) == (0, 0)  # no window ends where the prefix must


def _chunk_bytes(engine: Engine) -> int:
    """From the line with which the spec says how it sized the pool."""
    found = re.search(r"Sized the CPU pool .*chunks of (\d+) bytes", engine.log)
    assert found
    return int(found[1])
