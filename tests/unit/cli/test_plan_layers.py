# SPDX-License-Identifier: Apache-2.0
"""Reading config.json: one spelling after another, against what the models are."""

import json

import pytest

from vllm_tiered_offload.cli.planning.layers import read_layers
from vllm_tiered_offload.cli.planning.model_config import ModelError, find_config, load_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def summary(config: dict) -> dict[tuple[str, int, int, int], int]:
    """How many layers there are of each (kind, heads, values, window)."""
    found: dict = {}
    for layer in read_layers(config).layers:
        key = (layer.kind, layer.heads, layer.values, layer.window)
        found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(LLAMA, {("full", 8, 256, 0): 32}, id="llama-gqa"),
        pytest.param(
            {"n_layer": 12, "n_head": 12, "n_embd": 768},
            {("full", 12, 128, 0): 12},
            id="gpt2-dense",
        ),
        pytest.param(
            {**LLAMA, "head_dim": 64, "v_head_dim": 96},
            {("full", 8, 160, 0): 32},
            id="own-head-sizes",
        ),
        pytest.param(
            {
                "num_hidden_layers": 32,
                "num_attention_heads": 71,
                "hidden_size": 4544,
                "multi_query": True,
            },
            {("full", 1, 128, 0): 32},
            id="falcon-multi-query",
        ),
        pytest.param(
            {
                "n_layers": 2,
                "n_heads": 4,
                "d_model": 64,
                "attn_config": {"kv_n_heads": 2},
            },
            {("full", 2, 32, 0): 2},
            id="dbrx-nested",
        ),
        pytest.param(
            {
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "hidden_size": 2048,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            {("full", 1, 576, 0): 27},
            id="deepseek-mla",
        ),
        pytest.param(
            {**LLAMA, "sliding_window": 4096},
            {("window", 8, 256, 4096): 32},
            id="mistral-window",
        ),
        pytest.param(
            {**LLAMA, "sliding_window": 4096, "use_sliding_window": False},
            {("full", 8, 256, 0): 32},
            id="qwen2-window-off",
        ),
        pytest.param(
            {
                **LLAMA,
                "num_hidden_layers": 4,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            {("window", 8, 256, 128): 2, ("full", 8, 256, 0): 2},
            id="gpt-oss-hybrid",
        ),
        pytest.param(
            {
                "model_type": "gemma3",
                "text_config": {
                    **LLAMA,
                    "model_type": "gemma3_text",
                    "num_hidden_layers": 13,
                    "sliding_window": 512,
                },
            },
            {("window", 8, 256, 512): 11, ("full", 8, 256, 0): 2},
            id="gemma3-nested-by-pattern",
        ),
        pytest.param(
            {**LLAMA, "num_key_value_heads": [2] * 16 + [4] * 16},
            {("full", 2, 256, 0): 16, ("full", 4, 256, 0): 16},
            id="heads-per-layer",
        ),
        pytest.param(
            {**LLAMA, "num_kv_shared_layers": 10},
            {("full", 8, 256, 0): 22},
            id="shared-kv-layers",
        ),
    ],
)
def test_families(config, expected):
    assert summary(config) == expected
    assert read_layers(config).exact


@pytest.mark.parametrize(
    ("extra", "kv_layers"),
    [
        ({"full_attention_interval": 4}, 8),  # Qwen3-Next
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, 4),  # Jamba
        ({"attn_type_list": [0, 1] * 16}, 16),  # MiniMax
        ({"hybrid_override_pattern": "M-M*-M*"}, 2),  # Nemotron-H
        ({"layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, 8),
    ],
)
def test_layers_with_state_are_left_out_and_said_so(extra, kv_layers):
    model = read_layers({**LLAMA, **extra})
    assert sum(layer.kind == "full" for layer in model.layers) == kv_layers
    assert not model.exact
    assert "state" in model.notes[0]


def test_what_is_not_certain_is_said():
    odd = {**LLAMA, "layer_types": ["quantum_attention"] * 32}
    assert "quantum_attention" in read_layers(odd).notes[0]
    assert read_layers({**LLAMA, "is_encoder_decoder": True}).notes
    quantized = {"quantization": {"kv_cache_quant_algo": "FP8"}, "quant_method": "modelopt"}
    assert (
        "--kv-cache-dtype" in read_layers({**LLAMA, "quantization_config": quantized}).notes[0]
    )
    assert read_layers({**LLAMA, "quantization_config": {"quant_method": "awq"}}).exact


@pytest.mark.parametrize(
    ("config", "missing"),
    [({}, "layers"), ({"num_hidden_layers": 2}, "attention heads")],
)
def test_not_a_decoder(config, missing):
    with pytest.raises(ModelError, match=f"no number of {missing}"):
        read_layers(config)


def test_no_attention_at_all():
    with pytest.raises(ModelError, match="no layer with attention"):
        read_layers({**LLAMA, "layer_types": ["mamba"] * 32})


class TestFindingTheFile:
    def test_a_directory_and_a_file(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        assert load_config(str(tmp_path)) == LLAMA
        assert load_config(str(tmp_path / "config.json")) == LLAMA

    def test_the_hub_cache_prefers_main(self, tmp_path):
        repository = tmp_path / "models--org--name"
        for revision in ("aaa", "bbb"):
            (repository / "snapshots" / revision).mkdir(parents=True)
            (repository / "snapshots" / revision / "config.json").write_text("{}")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("aaa\n")
        environ = {"HF_HUB_CACHE": str(tmp_path)}
        assert find_config("org/name", environ).parent.name == "aaa"

    def test_nothing_there(self, tmp_path):
        with pytest.raises(ModelError, match=r"hf download org/name config\.json"):
            find_config("org/name", {"HF_HUB_CACHE": str(tmp_path)})

    @pytest.mark.parametrize("text", ["[]", "{", "\xff"])
    def test_not_json(self, tmp_path, text):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=r"config\.json"):
            load_config(str(tmp_path))
