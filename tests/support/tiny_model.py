# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights and a made tokenizer, built offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 512

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def save_tokenizer(directory: Path) -> None:
    """One token a character, and `<xN>` for the rest of the vocabulary."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(i): i for i in range(256)}
    vocab.update({f"<x{i}>": i for i in range(256, VOCAB)})
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<x256>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<x256>",
        eos_token="<x257>",
        bos_token="<x258>",
    ).save_pretrained(str(directory))


def make_llama(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A Llama with random weights (dense, grouped-query attention)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(directory, LlamaConfig(**{**_BASE, **overrides}), LlamaForCausalLM, seed)


def make_gemma3(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A Gemma 3 text model: sliding-window and full attention, two KV groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    settings = {
        **_BASE,
        "head_dim": 32,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **overrides,
    }
    return _save(directory, Gemma3TextConfig(**settings), Gemma3ForCausalLM, seed)


def make_deepseek(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A DeepSeek V2: latent KV (MLA), no mixture of experts in so few layers."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    settings = {
        **_BASE,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        **overrides,
    }
    return _save(directory, DeepseekV2Config(**settings), DeepseekV2ForCausalLM, seed)


def _save(directory: Path, config: Any, model_class: Any, seed: int) -> Path:
    """Write model and tokenizer unless the directory holds them already."""
    import torch

    stamp = directory / "made.json"
    want = {"seed": seed, "config": config.to_dict()}
    text = json.dumps(want, sort_keys=True, default=str)
    if stamp.exists() and stamp.read_text() == text:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model_class(config).to(torch.bfloat16).save_pretrained(str(directory))
    save_tokenizer(directory)
    stamp.write_text(text)
    return directory
