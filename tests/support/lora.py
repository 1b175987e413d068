# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters with made weights for the models of `tiny_model`."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8


def make_adapter(directory: Path, model: Path, *, seed: int) -> Path:
    """An adapter on all attention projections, strong enough to change the tokens.

    Written in place: the same path with other weights for another `seed`.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    widths = {
        "q_proj": head_size * heads,
        "k_proj": head_size * config["num_key_value_heads"],
        "v_proj": head_size * config["num_key_value_heads"],
    }
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=source)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=source)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(model),
                "r": RANK,
                "lora_alpha": RANK,
                "target_modules": sorted(widths),
                "bias": "none",
            }
        )
    )
    return directory
