# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model keep KV, and how much a token takes in each.

Model families spell the same facts in different words; every spelling known here is in
one of the tuples below. What cannot be read from config.json alone becomes a note, and the
estimate says that it is not exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_tiered_offload.cli.planning.model_config import ModelError

Kind = Literal["full", "window", "state"]

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_WORDS: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "hybrid": "full",
    "sliding_attention": "window",
    "chunked_attention": "full",
    "linear_attention": "state",
    "mamba": "state",
    "recurrent": "state",
    "conv": "state",
}
# Two layers of sliding window in a row are not spelled out by these older configurations.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's KV of one token: `values` numbers for each of `heads` key-value heads.

    MLA keeps one latent vector a token, which tensor parallelism does not split.
    """

    kind: Kind
    heads: int
    values: int
    window: int = 0
    latent: bool = False


@dataclass(frozen=True, slots=True)
class ModelKv:
    """The layers that keep KV, and what could not be read with certainty.

    `attention_heads` is 0 where the configuration does not say.
    """

    name: str
    layers: tuple[Layer, ...]
    attention_heads: int
    dtype: str
    max_tokens: int | None
    notes: tuple[str, ...] = field(default=())

    @property
    def exact(self) -> bool:
        return not self.notes


def read_layers(config: Mapping[str, Any]) -> ModelKv:
    """The layers described by a config.json.

    Raises:
        ModelError: it does not describe a decoder with attention.
    """
    text = _text_part(config)
    notes: list[str] = []
    kinds = _layer_kinds(text, _count(text, _LAYERS, "layers"), notes)
    if text.get("kv_lora_rank"):
        layers = _latent_layers(text, kinds, notes)
    else:
        layers = _head_layers(text, kinds, notes)
    heads = _first(text, _HEADS)
    if not any(layer.kind != "state" for layer in layers):
        raise ModelError("--model: no layer with attention; there is no KV to keep")
    if config.get("is_encoder_decoder"):
        notes.append("encoder-decoder: the cross-attention's KV is not counted")
    if _quantizes_kv(config.get("quantization_config")):
        notes.append(
            "the checkpoint asks for a quantized KV cache: state --kv-cache-dtype here"
        )
    return ModelKv(
        name=str((config.get("architectures") or ["unknown"])[0]),
        layers=layers,
        attention_heads=heads if isinstance(heads, int) else 0,
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")),
        max_tokens=_first(text, ("max_position_embeddings", "n_positions", "max_seq_len")),
        notes=tuple(notes),
    )


def _quantizes_kv(quantization: Any) -> bool:
    """Whether vLLM may choose a KV dtype by itself from the checkpoint's quantization."""
    if not isinstance(quantization, Mapping):
        return False
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    return any(quantization.get(name) for name in names) or _quantizes_kv(
        quantization.get("quantization")
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own part of a multi-modal configuration."""
    for name in _TEXT_PARTS:
        part = config.get(name)
        if isinstance(part, Mapping) and part:
            return _text_part(part)
    return config


def _first(text: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((text[name] for name in names if text.get(name) is not None), None)


def _count(text: Mapping[str, Any], names: tuple[str, ...], what: str) -> int:
    value = _first(text, names)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"--model: config.json names no number of {what} (looked for {', '.join(names)})"
        )
    return value


def _layer_kinds(text: Mapping[str, Any], count: int, notes: list[str]) -> list[Kind]:
    words = _first(text, ("layer_types", "layers_block_type"))
    if isinstance(words, list) and words:
        unknown = sorted({str(word) for word in words} - set(_WORDS))
        if unknown:
            notes.append(f"layers of unknown kind counted as full attention: {unknown}")
        if "chunked_attention" in words:
            notes.append("chunked attention counted as full attention, as vLLM keeps it")
        kinds = [_WORDS.get(str(word), "full") for word in words]
    else:
        kinds = _kinds_by_pattern(text, count)
    shared = int(text.get("num_kv_shared_layers") or 0)
    if shared:
        kinds = kinds[: len(kinds) - shared]
    if "state" in kinds:
        notes.append(
            f"{kinds.count('state')} layers keep a state instead of KV (Mamba, linear "
            "attention); it is not counted, and vLLM enlarges the block to its size"
        )
    return kinds


def _kinds_by_pattern(text: Mapping[str, Any], count: int) -> list[Kind]:
    full = _attention_of_state_models(text, count)
    if full is not None:
        return ["full" if attends else "state" for attends in full]
    if not _window(text):
        return ["full"] * count
    every = _first(text, ("sliding_window_pattern", "_sliding_window_pattern"))
    every = every or _WINDOW_PATTERNS.get(str(text.get("model_type")))
    if isinstance(every, int) and every > 1:
        return ["window" if (i + 1) % every else "full" for i in range(count)]
    return ["window"] * count


def _attention_of_state_models(text: Mapping[str, Any], count: int) -> list[bool] | None:
    """Which layers of a model with Mamba or linear attention attend; None for other models."""
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):  # Nemotron-H
        return [letter == "*" for letter in pattern if letter in "M*"]
    if isinstance(marks := text.get("attn_type_list"), list):  # MiniMax
        return [bool(mark) for mark in marks]
    if every := text.get("attn_layer_period"):  # Jamba
        offset = int(text.get("attn_layer_offset") or 0)
        return [i % every == offset for i in range(count)]
    if every := text.get("full_attention_interval"):  # Qwen3-Next
        return [(i + 1) % every == 0 for i in range(count)]
    return None


def _window(text: Mapping[str, Any]) -> int:
    """Tokens in the sliding window; 0 where there is none or it is switched off."""
    value = text.get("sliding_window")
    if not isinstance(value, int) or text.get("use_sliding_window") is False:
        return 0
    return value


def _latent_layers(
    text: Mapping[str, Any], kinds: list[Kind], notes: list[str]
) -> tuple[Layer, ...]:
    values = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    if text.get("index_topk"):
        notes.append("sparse attention: the indexer's cache is not counted")
    return tuple(
        Layer(kind if kind == "state" else "full", 1, values, latent=True) for kind in kinds
    )


def _head_layers(
    text: Mapping[str, Any], kinds: list[Kind], notes: list[str]
) -> tuple[Layer, ...]:
    heads = _count(text, _HEADS, "attention heads")
    per_layer = _kv_heads(text, heads, len(kinds))
    head_dim = _first(text, ("head_dim", "attention_head_dim"))
    if not isinstance(head_dim, int):
        head_dim = _count(text, _HIDDEN, "hidden units") // heads
    value_dim = text.get("v_head_dim") or head_dim
    window = _window(text)
    if "window" in kinds and not window:
        notes.append("layers with a sliding window of unknown length counted as full attention")
        kinds = ["full" if kind == "window" else kind for kind in kinds]
    wide = text.get("global_head_dim")  # Gemma 4: full-attention layers have other heads
    if wide:
        notes.append("full-attention layers with heads of their own: vLLM's blocks may differ")
    wide_heads = text.get("num_global_key_value_heads")
    layers = []
    for kind, kv_heads in zip(kinds, per_layer, strict=True):
        if wide and kind == "full":
            layers.append(Layer(kind, int(wide_heads or kv_heads), 2 * wide))
        else:
            span = window if kind == "window" else 0
            layers.append(Layer(kind, kv_heads, head_dim + value_dim, span))
    return tuple(layers)


def _kv_heads(text: Mapping[str, Any], heads: int, layers: int) -> list[int]:
    nested = text.get("attn_config")
    value = _first(text, _KV_HEADS)
    if value is None and isinstance(nested, Mapping):  # MPT, DBRX
        value = nested.get("kv_n_heads")
    if isinstance(value, list):
        return [int(item) for item in value][:layers]
    multi_query = text.get("multi_query") and not text.get("new_decoder_architecture")
    if multi_query and value in (None, heads):
        value = 1
    return [int(value or heads)] * layers
