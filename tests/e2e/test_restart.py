# SPDX-License-Identifier: Apache-2.0
"""The main job on the real vLLM: a prefix that survives a restart, with equal tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.engine import Engine, Output, prompt, tiering, wait_until

pytestmark = pytest.mark.engine

# A shared prefix of four chunks (128 tokens each), different tails, one stranger.
SHARED = prompt(512, seed=7)
PROMPTS = [
    SHARED + prompt(488, seed=1),
    SHARED + prompt(300, seed=2),
    prompt(1500, seed=9),
]
READ_BYTES = "vllm:kv_offload_tiering_read_bytes"
WRITE_BYTES = "vllm:kv_offload_tiering_write_bytes"


def one_by_one(engine: Engine) -> list[Output]:
    return [engine.generate([p], max_tokens=8, logprobs=True)[0] for p in PROMPTS]


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


def whole_chunks(outputs: list[Output]) -> None:
    """Every whole chunk of every prompt came from a cache (the last token never does)."""
    assert [o.cached for o in outputs] == [(len(p) - 1) // 128 * 128 for p in PROMPTS]


@pytest.fixture(scope="module")
def plain_llama(tiny_llama: Path) -> list[Output]:
    """What vLLM answers without us."""
    with Engine(tiny_llama) as engine:
        return one_by_one(engine)


def test_memory_then_restart(
    tiny_llama: Path, plain_llama: list[Output], tmp_path: Path, no_leftovers_in_shm: None
) -> None:
    root = tmp_path / "kv"
    with Engine(tiny_llama, tiering(root), processes=True) as first:
        cold = one_by_one(first)
        assert tokens(cold) == tokens(plain_llama)
        # The sizing ran inside vLLM's own worker process.
        sized = re.findall(r"\(Worker.*Sized the CPU pool in worker 0 of 1", first.log)
        assert len(sized) == 1
        assert first.reset()
        from_memory = one_by_one(first)
        assert tokens(from_memory) == tokens(plain_llama)
        whole_chunks(from_memory)
        assert first.metrics().get(READ_BYTES, 0) == 0

    # Worker and scheduler in one process read what separate processes wrote; two
    # workers, below, read what separate processes wrote in separate processes.
    with Engine(tiny_llama, tiering(root)) as second:
        from_disk = one_by_one(second)
        assert tokens(from_disk) == tokens(plain_llama)
        assert [o.logprob for o in from_disk] == [o.logprob for o in plain_llama]
        whole_chunks(from_disk)
        assert second.metrics()[READ_BYTES] > 0


def test_damaged_bytes_would_be_noticed(
    tiny_llama: Path, plain_llama: list[Output], tmp_path: Path
) -> None:
    """The tokens of the other tests really depend on the KV that was loaded.

    A negative control: with the halves of the pool's rows swapped behind the
    engine's back (in memory, past every checksum) the answers change.
    """
    env = {"VTO_TEST_SWAP_ROWS": "1", "PYTHONPATH": str(Path(__file__).parent / "saboteur")}
    config = tiering(tmp_path / "kv")
    config["kv_connector_extra_config"] |= {
        "spec_name": "SwappingSpec",
        "spec_module_path": "swapping_spec",
    }
    with Engine(tiny_llama, config, env=env) as engine:
        one_by_one(engine)
        assert engine.reset()
        swapped = one_by_one(engine)
    whole_chunks(swapped)
    assert tokens(swapped) != tokens(plain_llama)


def test_two_workers(tiny_llama: Path, tmp_path: Path, no_leftovers_in_shm: None) -> None:
    root = tmp_path / "kv"
    options = {"tensor_parallel_size": 2}
    with Engine(tiny_llama, tiering(root), **options) as first:
        cold = one_by_one(first)
        for rank in (0, 1):
            assert f"Sized the CPU pool in worker {rank} of 2" in first.log
        assert first.reset()
        from_memory = one_by_one(first)
        assert tokens(from_memory) == tokens(cold)
        whole_chunks(from_memory)
    with Engine(tiny_llama, tiering(root), **options) as second:
        from_disk = one_by_one(second)
        assert tokens(from_disk) == tokens(cold)
        whole_chunks(from_disk)
        assert second.metrics()[READ_BYTES] > 0


def test_two_kv_groups(tiny_gemma3: Path, tmp_path: Path) -> None:
    """Sliding-window and full attention layers."""
    root = tmp_path / "kv"
    with Engine(tiny_gemma3) as plain:
        expected = tokens(one_by_one(plain))
    with Engine(tiny_gemma3, tiering(root)) as first:
        assert tokens(one_by_one(first)) == expected
    with Engine(tiny_gemma3, tiering(root)) as second:
        from_disk = one_by_one(second)
        assert tokens(from_disk) == expected
        whole_chunks(from_disk)


def test_chunks_of_several_blocks(
    tiny_llama: Path, plain_llama: list[Output], tmp_path: Path
) -> None:
    config = tiering(tmp_path / "kv", blocks_per_chunk=3)
    with Engine(tiny_llama, config) as first:
        one_by_one(first)
    with Engine(tiny_llama, config) as second:
        from_disk = one_by_one(second)
        assert tokens(from_disk) == tokens(plain_llama)
        chunk = 3 * 128
        assert [o.cached for o in from_disk[::2]] == [
            (len(p) - 1) // chunk * chunk for p in PROMPTS[::2]
        ]


def test_generated_tokens_are_stored_when_asked(tiny_llama: Path, tmp_path: Path) -> None:
    config = tiering(tmp_path / "kv", offload_prompt_only=False)
    with Engine(tiny_llama, config) as first:
        answer = first.generate([PROMPTS[0]], max_tokens=300)[0]
    turn = [*PROMPTS[0], *answer.tokens, *prompt(50, seed=3)]
    with Engine(tiny_llama, config) as second:
        again = second.generate([turn], max_tokens=4)[0]
        assert again.cached > len(PROMPTS[0])


def test_cpu_only_spec(tiny_llama: Path, plain_llama: list[Output]) -> None:
    config = tiering(None, spec_name="AlignedCPUOffloadingSpec")
    with Engine(tiny_llama, config) as engine:
        one_by_one(engine)
        assert engine.reset()
        from_memory = one_by_one(engine)
        assert tokens(from_memory) == tokens(plain_llama)
        whole_chunks(from_memory)
        assert "0 padding (0.0 %)" in engine.log


def test_disk_keeps_what_the_pool_evicted(
    tiny_llama: Path, plain_llama: list[Output], tmp_path: Path
) -> None:
    """A pool of twelve chunks under a working set of more, in one engine."""
    with Engine(tiny_llama, tiering(tmp_path / "kv", cpu_bytes="1536KiB")) as engine:
        one_by_one(engine)
        wait_until(lambda: engine.metrics().get(WRITE_BYTES, 0) > 0)
        assert engine.reset()
        again = one_by_one(engine)
        assert tokens(again) == tokens(plain_llama)
        assert engine.metrics()[READ_BYTES] > 0
