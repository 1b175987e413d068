# SPDX-License-Identifier: Apache-2.0
"""Facts about the model itself: its weights, its effective configuration, its draft."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from vllm_tiered_offload.spec.weights import Weights, commit_of, identify_weights

# Formats whose weights are exactly the files in the model's directory. Left out on purpose:
# dummy (random), npcache (a converted copy that is never invalidated), tensorizer, ipc_cache,
# modelexpress and whatever a plugin adds (weights come from elsewhere).
_LOCAL_FORMATS = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "pt",
        "mistral",
        "gguf",
        "bitsandbytes",
        "sharded_state",
        "runai_streamer",
        "runai_streamer_sharded",
    }
)
_LOADER_SPEED = frozenset(
    {"enable_multithread_load", "num_threads", "concurrency", "memory_limit", "distributed"}
)
# Of a Hugging Face configuration: where it came from, and what vLLM writes into it.
_NOT_THE_MODEL = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "auto_map",
        "transformers_version",
        "max_model_len",
    }
)
_WORTH_READING = (
    "model_type",
    "architectures",
    "hidden_size",
    "num_hidden_layers",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
)
_MM_SETTINGS = (
    "language_model_only",
    "mm_processor_kwargs",
    "mm_encoder_attn_dtype",
    "mm_device_do_normalize",
    "mm_processor_device",
    "video_pruning_rate",
    "video_pruning_method",
    "interleave_mm_strings",
)


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """`identity` goes into the fingerprint, `about` to people."""

    identity: dict[str, Any]
    about: dict[str, Any]
    changed_since_start: str | None = None


def weights(model: Any, load: Any) -> FoundWeights:
    """The weights of a vLLM `ModelConfig`, loaded as a `LoadConfig` says.

    Raises:
        ValueError: they are not files that can be looked at here.
        WeightsError: the files cannot be read.
    """
    format_name = str(load.load_format).lower()
    if format_name not in _LOCAL_FORMATS:
        raise ValueError(f"load format {format_name} does not load the model's own files")
    path = _local_path(model, load)
    found = identify_weights(path)
    return FoundWeights(
        {"content": found.content, "commit": found.commit},
        {
            "path": path,
            "files": found.files,
            "total_bytes": found.total_bytes,
            "read_bytes": found.read_bytes,
            "seconds": round(found.seconds, 3),
        },
        _changed_since_start(path, found),
    )


def _local_path(model: Any, load: Any) -> str:
    name = str(getattr(model, "model_weights", "") or model.model)
    if os.path.exists(name):
        return name
    if "://" in name:
        raise ValueError(f"{name} is not a local path")
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        name,
        revision=model.revision,
        cache_dir=load.download_dir,
        local_files_only=True,
    )
    loaded = getattr(model.hf_config, "_commit_hash", None)
    if loaded is not None and commit_of(found) not in (None, loaded):
        raise ValueError(
            f"{name} moved from commit {loaded} to {commit_of(found)} while it was loaded"
        )
    return str(found)


def _changed_since_start(path: str, found: Weights) -> str | None:
    # A snapshot is named by its commit and downloaded by the engine itself. In one process
    # with the application the process may be older than a model that it made.
    if found.commit is not None or multiprocessing.parent_process() is None:
        return None
    if found.changed <= psutil.Process().create_time():
        return None
    return f"files in {path} changed after the engine started: which weights it has is unknown"


def load_format(load: Any) -> dict[str, Any]:
    extra = load.model_loader_extra_config
    if not isinstance(extra, Mapping):
        extra = {"settings": type(extra).__name__}
    chosen = {key: value for key, value in extra.items() if key not in _LOADER_SPEED}
    return {"format": str(load.load_format).lower(), "settings": _digest(chosen)}


def model(config: Any) -> dict[str, Any]:
    """The effective configuration, after `hf_overrides` and vLLM's own changes."""
    whole = _cleaned(config.hf_config.to_dict())
    text = _cleaned(config.hf_text_config.to_dict())
    return {
        "digest": _digest([whole, text]),
        "text": {name: text[name] for name in _WORTH_READING if name in text},
        "runner": [str(config.runner_type), str(getattr(config, "convert_type", None))],
        "implementation": str(config.model_impl),
        "classes": _plain(getattr(config, "model_class_overrides", None)),
        "sliding_window_off": bool(config.disable_sliding_window),
        "context": _context_that_counts(config, text),
    }


def _context_that_counts(config: Any, text: Mapping[str, Any]) -> int | None:
    """The longest context where it changes what is computed, else None.

    LongRoPE picks its factors by it, Llama 4 scales its attention by it.
    """
    kinds = json.dumps([text.get("rope_parameters"), text.get("rope_scaling")], default=str)
    sensitive = "longrope" in kinds or '"su"' in kinds or "dynamic" in kinds
    if sensitive or "llama4" in str(text.get("model_type")):
        return int(config.max_model_len)
    return None


def quantization(config: Any) -> dict[str, Any] | None:
    settings = getattr(config, "quantization_config", None)
    if config.quantization is None and settings is None:
        return None
    return {"method": str(config.quantization), "settings": _digest(settings)}


def multimodal(config: Any) -> dict[str, Any] | None:
    settings = config.multimodal_config
    if settings is None:
        return None
    return {name: _plain(getattr(settings, name, None)) for name in _MM_SETTINGS}


def draft(speculative: Any) -> dict[str, Any] | None:
    """Draft model and method: layers of a draft keep their KV in the same chunks."""
    if speculative is None:
        return None
    found: dict[str, Any] = {"method": str(speculative.method)}
    config = speculative.draft_model_config
    if config is not None:
        found["model"] = model(config)
        found["quantization"] = quantization(config)
        found["dtype"] = str(config.dtype).removeprefix("torch.")
    return found


def draft_weights(config: Any) -> dict[str, Any] | str | None:
    """The draft's weights, where it is not the model itself (n-gram, MTP).

    Raises what `weights` raises.
    """
    speculative, target = config.speculative_config, config.model_config
    drafted = None if speculative is None else speculative.draft_model_config
    if drafted is None:
        return None
    if (drafted.model, drafted.revision) == (target.model, target.revision):
        return "the model's own"
    load = getattr(speculative, "draft_load_config", None) or config.load_config
    return weights(drafted, load).identity


def never_shared(config: Any) -> list[str]:
    """Reasons for a private cache that no promise of the user outweighs."""
    if getattr(config, "weight_transfer_config", None) is not None:
        return ["weights are replaced while the engine runs (weight_transfer_config)"]
    return []


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _cleaned(v) for k, v in value.items() if str(k) not in _NOT_THE_MODEL}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))  # a set's own order changes from process to process
    return value


def text(value: Any) -> str:
    """`str(value)`, if it is the same in every process.

    Raises:
        TypeError: it names an address; the cache would silently be a new one every time.
    """
    found = str(value)
    if " at 0x" in found:
        raise TypeError(f"a {type(value).__name__} has no lasting description")
    return found


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=text))


def _digest(value: Any) -> str:
    text = json.dumps(_plain(value), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
