# SPDX-License-Identifier: Apache-2.0
"""Real engines on one directory: only those with the same bytes find each other's chunks.

Each engine asks for the same prompt. What it may share is a hit with equal tokens; what it
may not is computed anew without a byte read from the disk.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine, Output, prompt, tiering
from tests.support.tiny_model import make_llama

pytestmark = pytest.mark.engine

PROMPT = prompt(1000, seed=3)
CACHED = 896  # whole blocks of 128 tokens
READ_BYTES = "vllm:kv_offload_tiering_read_bytes"


def ask(engine: Engine, **sampling: Any) -> Output:
    return engine.generate([PROMPT], max_tokens=8, logprobs=True, **sampling)[0]


def run(model: Path, root: Path, *, config: Any = None, **options: Any) -> tuple[Output, float]:
    """One answer of a new engine, and the bytes it read from the disk for it."""
    with Engine(model, config or tiering(root), **options) as engine:
        output = ask(engine)
        return output, engine.metrics().get(READ_BYTES, 0.0)


def computed(model: Path, root: Path, **options: Any) -> Output:
    output, read = run(model, root, **options)
    assert (output.cached, read) == (0, 0)
    return output


def found(model: Path, root: Path, **options: Any) -> Output:
    output, read = run(model, root, **options)
    assert output.cached == CACHED
    assert read > 0
    return output


@dataclass(frozen=True)
class Seeded:
    """A model of its own path, a root that one engine has filled, and its answers."""

    model: Path
    root: Path
    answer: Output


@pytest.fixture(scope="module")
def seeded(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    directory = tmp_path_factory.mktemp("identity")
    model = shutil.copytree(tiny_llama, directory / "model")
    root = directory / "root"
    with Engine(model, tiering(root)) as engine:
        answer = ask(engine)
        assert answer.cached == 0
        assert ask(engine, cache_salt="a").cached == 0
    return Seeded(model, root, answer)


def test_copy_elsewhere_shares_and_salts_do_not(seeded: Seeded, tmp_path: Path) -> None:
    copy = shutil.copytree(seeded.model, tmp_path / "copy")
    # Settings that do not matter differ as well.
    config = tiering(seeded.root, cpu_bytes="32MiB")
    with Engine(copy, config, max_num_seqs=7, max_model_len=2048, seed=1) as engine:
        again = ask(engine)
        assert (again.tokens, again.cached) == (seeded.answer.tokens, CACHED)
        assert again.logprob == seeded.answer.logprob
        assert ask(engine, cache_salt="b").cached == 0
        assert ask(engine, cache_salt="a").cached == CACHED


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {
            "hf_overrides": {
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
            }
        },
    ],
    ids=["dtype", "rope factor"],
)
def test_other_bytes_are_not_read(seeded: Seeded, options: dict[str, Any]) -> None:
    computed(seeded.model, seeded.root, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 64},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"prefix_caching_hash_algo": "xxhash"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"load_format": "dummy"},
        {"hf_overrides": {"max_position_embeddings": 4096}},
    ],
    ids=str,
)
def test_more_other_bytes_are_not_read(seeded: Seeded, options: dict[str, Any]) -> None:
    computed(seeded.model, seeded.root, **options)


def test_two_fine_tunes_at_one_path(seeded: Seeded, tmp_path: Path) -> None:
    """Runs last of those on the shared root: it ends with the first weights in place."""
    tuned = make_llama(tmp_path / "tuned", seed=1)
    weights = seeded.model / "model.safetensors"
    first = shutil.copyfile(weights, tmp_path / "first.safetensors")
    shutil.copyfile(tuned / "model.safetensors", weights)
    other = computed(seeded.model, seeded.root)
    assert other.tokens != seeded.answer.tokens
    shutil.copyfile(first, weights)
    # What the others stored beside it has done no harm.
    assert found(seeded.model, seeded.root).tokens == seeded.answer.tokens


def test_two_ranks_do_not_read_what_one_has_stored(seeded: Seeded) -> None:
    output = computed(seeded.model, seeded.root, tensor_parallel_size=2)
    assert output.tokens == seeded.answer.tokens


@pytest.mark.slow
def test_canonical_layout_is_portable_across_ranks(
    tiny_llama: Path, seeded: Seeded, tmp_path: Path
) -> None:
    config = tiering(tmp_path / "root", canonical_layout=True)
    one = computed(tiny_llama, tmp_path, config=config)
    two = found(tiny_llama, tmp_path, config=config, tensor_parallel_size=2)
    assert one.tokens == two.tokens == seeded.answer.tokens


@pytest.mark.slow
def test_canonical_layout_is_portable_the_other_way(
    tiny_llama: Path, seeded: Seeded, tmp_path: Path
) -> None:
    config = tiering(tmp_path / "root", canonical_layout=True)
    two = computed(tiny_llama, tmp_path, config=config, tensor_parallel_size=2)
    one = found(tiny_llama, tmp_path, config=config)
    assert one.tokens == two.tokens == seeded.answer.tokens


@pytest.mark.slow
def test_two_ranks_find_their_own(seeded: Seeded) -> None:
    with Engine(seeded.model, tiering(seeded.root), tensor_parallel_size=2) as engine:
        first = ask(engine)
    again = found(seeded.model, seeded.root, tensor_parallel_size=2)
    assert again.tokens == first.tokens
