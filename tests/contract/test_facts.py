# SPDX-License-Identifier: Apache-2.0
"""Facts collected from vLLM's real configuration objects, as in a worker."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
)

from vllm_tiered_offload.fs_tier.fingerprint import FACTS, check_manifest
from vllm_tiered_offload.fs_tier.identity import Identity, Layout, resolve_namespace
from vllm_tiered_offload.spec import facts as facts_module
from vllm_tiered_offload.spec import model_facts
from vllm_tiered_offload.spec.facts import collect_facts, describe

PAGE = 32 * 2 * 64 * 2
LAYOUT = Layout(
    tokens_per_hash=32,
    blocks_per_chunk=1,
    chunk_bytes=2 * PAGE,
    groups=({"id": 0, "tokens_per_block": 32, "layers": ["layers.0", "layers.1"]},),
)


class Layer(AttentionLayerBase):
    """A layer as vLLM registers it, without weights."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def get_attn_backend(self) -> Any:
        return CPUAttentionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


def attention(kind: Any = FullAttentionSpec, **changes: Any) -> Any:
    settings = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return kind(**{**settings, **changes})


def caches(pages: tuple[int, ...] = (PAGE, PAGE), mapping: Any = None) -> CanonicalKVCaches:
    tensors = [
        CanonicalKVCacheTensor(torch.zeros(1, page, dtype=torch.int8), page) for page in pages
    ]
    refs = [CanonicalKVCacheRef(i, page, mapping) for i, page in enumerate(pages)]
    return CanonicalKVCaches(tensors, [refs])


def offloading_spec(rank: int = 0, dtype: str = "bfloat16", canonical: bool = False) -> Any:
    config = SimpleNamespace(
        parallel=SimpleNamespace(rank=rank),
        model=SimpleNamespace(dtype=dtype),
        canonical_layout=canonical,
        kv_cache_layout="LBHNC",
    )
    return SimpleNamespace(config=config)


@contextlib.contextmanager
def worker(model: Path | str, layers: list[Any] | None = None, **options: Any) -> Iterator[Any]:
    settings = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024}
    config = EngineArgs(model=str(model), **{**settings, **options}).create_engine_config()
    for number, spec in enumerate(layers or [attention(), attention()]):
        layer = Layer(spec)
        config.compilation_config.static_forward_context[f"layers.{number}"] = layer
    with set_current_vllm_config(config):
        yield config


def collect(model: Path | str, layers: list[Any] | None = None, **options: Any) -> Any:
    with worker(model, layers, **options):
        return collect_facts(offloading_spec(), caches())


def resolve(facts: Any, **options: Any) -> Identity:
    return resolve_namespace([json.loads(json.dumps(facts))], LAYOUT, **options)


def digits(facts: Any) -> str:
    found = resolve(facts)
    assert not found.private_reasons
    return found.namespace.fingerprint


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Any:
    return collect(tiny_llama)


def test_every_fact_is_found(plain: Any) -> None:
    assert plain["unknown"] == {}
    assert set(FACTS) <= set(plain)
    found = resolve(plain)
    assert not found.namespace.private
    assert not found.warnings
    check_manifest(found.namespace.fingerprint, found.namespace.manifest)


def test_facts_are_small_and_plain(plain: Any) -> None:
    assert len(json.dumps(plain)) < 4096
    assert json.loads(json.dumps(plain)) == plain


def test_facts_read_as_expected(plain: Any) -> None:
    assert plain["vllm"].count(".") == 1
    assert plain["model"]["text"]["model_type"] == "llama"
    assert plain["layers"] == [
        {
            "backend": "CPU_ATTN",
            "isa": plain["layers"][0]["isa"],
            "spec": plain["layers"][0]["spec"],
            "layers": ["layers.0", "layers.1"],
        }
    ]
    assert plain["layers"][0]["isa"] in {"vec", "vec16", "amx", "neon", "rvv", "vxe", "vsx"}
    assert plain["layers"][0]["spec"]["kind"] == "FullAttentionSpec"
    assert plain["layers"][0]["spec"]["dtype"] == "torch.bfloat16"
    assert plain["pages"]["bytes"] == [[2, PAGE]]
    assert plain["platform"]["device"] == "cpu"
    assert plain["hashing"]["algorithm"] == "sha256"
    assert plain["draft"] is plain["multimodal"] is plain["interleave"] is None
    assert plain["lora"] is False


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}},
        {"hf_overrides": {"max_position_embeddings": 4096}},
        {"hf_overrides": {"rms_norm_eps": 0.1}},
        {"load_format": "safetensors"},
        {"layers": [attention(), attention(head_size=64)]},
        {"layers": [attention(), attention(SlidingWindowSpec, sliding_window=64)]},
        {"layers": [attention(), attention(dtype=torch.float16)]},
        {"layers": [attention()]},
    ],
    ids=str,
)
def test_what_determines_the_bytes_changes_the_fingerprint(
    plain: Any, tiny_llama: Path, options: Any
) -> None:
    assert digits(collect(tiny_llama, **options)) != digits(plain)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 2048, "max_num_seqs": 3, "max_num_batched_tokens": 4096},
        {
            "served_model_name": "x",
            "seed": 5,
            "gpu_memory_utilization": 0.5,
            "prefix_caching_hash_algo": "sha256_cbor",
            "max_logprobs": 3,
        },
        {"enforce_eager": False, "trust_remote_code": True, "disable_log_stats": True},
    ],
    ids=str,
)
def test_what_does_not_keeps_it(plain: Any, tiny_llama: Path, options: Any) -> None:
    assert digits(collect(tiny_llama, **options)) == digits(plain)


def test_a_copy_of_the_model_keeps_it(plain: Any, tiny_llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    assert digits(collect(copy)) == digits(plain)


def test_other_weights_at_one_path_change_it(
    plain: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    weights = copy / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x11\x22")
    assert digits(collect(copy)) != digits(plain)


def test_lora_is_reported_and_does_not_change_the_base_models_bytes(
    plain: Any, tiny_llama: Path
) -> None:
    facts = collect(tiny_llama, enable_lora=True)
    assert facts["lora"] is True
    assert resolve(facts).namespace.private
    tagged = resolve(facts, adapters_tagged=True)
    assert tagged.salt_adapters
    assert tagged.namespace.fingerprint == digits(plain)


def test_the_probe_of_adapter_keys_agrees_with_vllm(plain: Any) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    def keys(path: str) -> Any:
        request = SimpleNamespace(
            lora_request=LoRARequest("name", 1, path),
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
        )
        return generate_block_hash_extra_keys(request, 0, 16, 0)[0]

    assert plain["lora_path_in_keys"] is (keys("/a") != keys("/b"))


@pytest.mark.parametrize("load_format", ["dummy", "npcache", "tensorizer", "some_plugin"])
def test_weights_from_elsewhere_make_it_private(plain: Any, load_format: str) -> None:
    load = SimpleNamespace(load_format=load_format, download_dir=None)
    with pytest.raises(ValueError, match=load_format):
        model_facts.weights(SimpleNamespace(model="/models/x", model_weights=""), load)


def test_dummy_weights_end_to_end(tiny_llama: Path) -> None:
    facts = collect(tiny_llama, load_format="dummy")
    found = resolve(facts)
    assert found.namespace.private
    assert "dummy" in found.private_reasons[0]
    assert not resolve(facts, cache_namespace="mine").namespace.private


@pytest.mark.parametrize("weights", ["s3://bucket/model", "gs://bucket/model"])
def test_weights_in_an_object_store_make_it_private(tmp_path: Path, weights: str) -> None:
    load = SimpleNamespace(load_format="runai_streamer", download_dir=None)
    config = SimpleNamespace(model=str(tmp_path), model_weights=weights)
    with pytest.raises(ValueError, match="is not a local path"):
        model_facts.weights(config, load)


def test_outside_a_worker_nothing_is_known() -> None:
    facts = collect_facts(offloading_spec(), caches())
    assert resolve(facts).namespace.private
    assert "configuration is not set" in facts["unknown"]["model"]


@pytest.mark.parametrize("name", ["release", "_layers", "_pages", "_platform", "_kv_layout"])
def test_a_failing_collector_never_raises(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("two\nlines")

    monkeypatch.setattr(facts_module, name, fail)
    facts = collect(tiny_llama)
    assert list(facts["unknown"].values()) == ["AttributeError: two lines"]
    assert resolve(facts).namespace.private


def test_descriptions_are_the_same_in_every_process() -> None:
    class Odd:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    assert describe(torch.bfloat16) == "torch.bfloat16"
    assert describe(Odd(base=32, inner=Odd())) == {
        "kind": "Odd",
        "base": 32,
        "inner": {"kind": "Odd"},
    }
    assert describe({"b", "a"}) == ["a", "b"]
    with pytest.raises(TypeError, match="no lasting description"):
        describe(object())
    with pytest.raises(TypeError, match="no lasting description"):
        model_facts.quantization(SimpleNamespace(quantization="x", quantization_config=Odd()))


def test_later_ranks_leave_the_weights_to_the_first(tiny_llama: Path) -> None:
    with worker(tiny_llama):
        first, second = (collect_facts(offloading_spec(rank), caches()) for rank in (0, 1))
    assert "weights" in first
    assert "weights" not in second
    two = Layout(**{**_fields(LAYOUT), "world_size": 2, "tp_size": 2})
    assert not resolve_namespace([first, second], two).namespace.private


def _fields(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in Layout.__dataclass_fields__}


def mapping(agnostic: bool) -> CanonicalPageMapping:
    return CanonicalPageMapping(
        canonical_page_size_bytes=PAGE,
        local_page_size_bytes=PAGE,
        runs=(),
        num_writers=1,
        writer_index=0,
        parallelism_agnostic=agnostic,
    )


@pytest.mark.parametrize(
    ("canonical", "certificate", "certified"),
    [
        (True, mapping(True), True),
        (True, mapping(False), False),
        (True, None, False),
        (False, mapping(True), False),
    ],
)
def test_portable_needs_the_layout_and_every_certificate(
    tiny_llama: Path, canonical: bool, certificate: Any, certified: bool
) -> None:
    with worker(tiny_llama):
        facts = collect_facts(offloading_spec(canonical=canonical), caches(mapping=certificate))
    assert facts["unknown"] == {}
    assert (facts["canonical"] is not None) is certified


def test_random_hash_seed_is_reported(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SimpleNamespace(prefix_caching_hash_algo="xxhash")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert facts_module._hashing(cache)["seed"] == "random"
    monkeypatch.setenv("PYTHONHASHSEED", "secret")
    assert facts_module._hashing(cache) == {"algorithm": "xxhash", "seed": "PYTHONHASHSEED"}


def test_vllm_agrees_about_random_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    random = {fn.__name__ for fn in kv_cache_utils._NON_CRYPTO_HASH_FUNCTIONS}
    assert random == set(facts_module._RANDOM_SEED_HASHES)


def test_runtime_weight_transfer_is_never_shared(tiny_llama: Path) -> None:
    with worker(tiny_llama) as config:
        config.weight_transfer_config = SimpleNamespace(backend="nccl")
        facts = collect_facts(offloading_spec(), caches())
    assert resolve(facts, cache_namespace="x").namespace.private


@pytest.mark.parametrize(
    ("text", "matters"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, False),
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"rope_scaling": {"type": "su"}}, True),
        ({"rope_scaling": None, "model_type": "llama4_text"}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, True),
        ({"model_type": "llama"}, False),
    ],
    ids=str,
)
def test_longest_context_counts_where_it_changes_the_bytes(text: Any, matters: bool) -> None:
    config = SimpleNamespace(max_model_len=4096)
    assert model_facts._context_that_counts(config, text) == (4096 if matters else None)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", "0.32"),
        ("0.32.1.post1+cpu", "0.32"),
        ("0.32.0rc1", "0.32"),
        ("1.0", "1.0"),
        ("0.32.1.dev7+gabc", "0.32.1.dev7+gabc"),
        ("unknown", "unknown"),
    ],
)
def test_release(version: str, release: str) -> None:
    assert facts_module.release(version) == release


# --- where the files are -----------------------------------------------------------------


def hub(tmp_path: Path, model: Path, commits: list[str], main: str) -> Path:
    repository = tmp_path / "hub" / "models--org--tiny"
    for commit in commits:
        shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(main)
    return tmp_path / "hub"


def named(cache: Path, loaded: str | None) -> tuple[Any, Any]:
    model = SimpleNamespace(
        model="org/tiny",
        model_weights="",
        revision=None,
        hf_config=SimpleNamespace(_commit_hash=loaded),
    )
    return model, SimpleNamespace(load_format="auto", download_dir=str(cache))


def test_name_on_the_hub_is_found_in_its_cache(tiny_llama: Path, tmp_path: Path) -> None:
    cache = hub(tmp_path, tiny_llama, ["a" * 40], "a" * 40)
    found = model_facts.weights(*named(cache, "a" * 40))
    assert found.identity["commit"] == "a" * 40
    assert found.changed_since_start is None


def test_revision_that_moved_while_loading_is_not_known(
    tiny_llama: Path, tmp_path: Path
) -> None:
    cache = hub(tmp_path, tiny_llama, ["a" * 40, "b" * 40], "b" * 40)
    with pytest.raises(ValueError, match=r"moved from commit a+ to b+"):
        model_facts.weights(*named(cache, "a" * 40))


def test_name_without_files_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"(?i)local|cache"):
        model_facts.weights(*named(tmp_path, None))


def test_files_that_change_while_the_engine_starts_are_never_shared(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    config = SimpleNamespace(model=str(copy), model_weights="")
    load = SimpleNamespace(load_format="auto", download_dir=None)
    # This very process is older than the copy, but an application may make its own model.
    assert model_facts.weights(config, load).changed_since_start is None
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    found = model_facts.weights(config, load)
    assert "changed after the engine started" in str(found.changed_since_start)


def test_draft_is_the_models_own_or_looked_at(tiny_llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_llama, tmp_path / "draft")
    with worker(tiny_llama) as config:
        target = config.model_config
        load = config.load_config
    other = SimpleNamespace(model=str(copy), model_weights="", revision=None)

    def weights(drafted: Any) -> Any:
        speculative = drafted and SimpleNamespace(draft_model_config=drafted)
        return model_facts.draft_weights(
            SimpleNamespace(
                speculative_config=speculative, model_config=target, load_config=load
            )
        )

    assert weights(None) is None
    assert weights(target) == "the model's own"
    assert weights(other) == model_facts.weights(other, load).identity
