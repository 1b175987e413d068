# SPDX-License-Identifier: Apache-2.0
"""What a worker knows about the bytes it will store, as plain data.

Only the workers have vLLM's configuration, the resolved attention backends and, on CPUs,
the instruction set that the KV layout depends on; the scheduler, where the disk tier
lives, has none of it. So each worker describes itself here and hands the description over
with the region; `fs_tier/identity.py` makes a fingerprint of it.

A fact that cannot be found out is left out and named under `unknown`, with the reason.
Nothing here may stop an engine: the cache then is this process's own, and works.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_tiered_offload.spec import model_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches

logger = init_logger("vllm.tiered_offload.spec")

_RANDOM_SEED_HASHES = ("xxhash", "xxhash_cbor")


def collect_facts(spec: Any, kv_caches: CanonicalKVCaches) -> dict[str, Any]:
    """This rank's description, ready for JSON; a few kilobytes.

    `spec` is the offloading spec (its `config` is vLLM's `OffloadingConfig`), `kv_caches`
    what vLLM registered. Call it in a worker, after the weights are loaded.
    """
    config = get_current_vllm_config_or_none()
    rank = spec.config.parallel.rank
    facts: dict[str, Any] = {"rank": rank, "unknown": {}}
    if config is None:
        facts["unknown"] = {"model": "vLLM's configuration is not set in this worker"}
        return facts
    collectors = _collectors(config, spec, kv_caches)
    if rank == 0:
        # All ranks load the same files; one of them is enough to look at them.
        collectors["weights"] = lambda: _weights(config, facts)
        collectors["draft_weights"] = lambda: model_facts.draft_weights(config)
    for name, collect in collectors.items():
        try:
            facts[name] = collect()
        except Exception as error:
            # Any failure: vLLM's internals may differ from what was read here.
            facts["unknown"][name] = f"{type(error).__name__}: {error}".replace("\n", " ")
    return facts


def _collectors(
    config: VllmConfig, spec: Any, kv_caches: CanonicalKVCaches
) -> dict[str, Callable[[], Any]]:
    model = config.model_config
    kv_dtype = str(spec.config.model.dtype)
    return {
        "vllm": lambda: release(vllm.__version__),
        "load_format": lambda: model_facts.load_format(config.load_config),
        "model": lambda: model_facts.model(model),
        "dtype": lambda: str(model.dtype).removeprefix("torch."),
        "kv_dtype": lambda: kv_dtype,
        "quantization": lambda: model_facts.quantization(model),
        "kv_layout": lambda: _kv_layout(config),
        "layers": lambda: _layers(config),
        "pages": lambda: _pages(kv_caches),
        "canonical": lambda: _canonical(config, spec, kv_caches),
        "draft": lambda: model_facts.draft(config.speculative_config),
        "multimodal": lambda: model_facts.multimodal(model),
        "platform": lambda: _platform(kv_dtype),
        "interleave": lambda: _interleave(config.parallel_config),
        "lora": lambda: config.lora_config is not None,
        "lora_path_in_keys": _lora_path_in_keys,
        "hashing": lambda: _hashing(config.cache_config),
        "never_shared": lambda: model_facts.never_shared(config),
        "about": lambda: {"vllm": vllm.__version__},
    }


def release(version: str) -> str:
    """`major.minor`; the whole version where it is a development build."""
    found = re.match(r"(\d+\.\d+)(?!.*dev)", version)
    return found.group(1) if found else version


def _weights(config: VllmConfig, facts: dict[str, Any]) -> dict[str, Any]:
    found = model_facts.weights(config.model_config, config.load_config)
    facts.setdefault("about", {})["weights"] = found.about
    if found.changed_since_start:
        facts.setdefault("never_shared", []).append(found.changed_since_start)
    logger.info(
        "Identified the weights: %d files, %d bytes, read %d of them in %.2f s",
        found.about["files"],
        found.about["total_bytes"],
        found.about["read_bytes"],
        found.about["seconds"],
    )
    return found.identity


def _kv_layout(config: VllmConfig) -> dict[str, Any]:
    return {
        "name": config.cache_config.kv_cache_layout,
        # The second model runner lays blocks out in its own way.
        "v2_model_runner": bool(getattr(config, "use_v2_model_runner", False)),
    }


def _layers(config: VllmConfig) -> list[dict[str, Any]]:
    """Layers with KV, those alike together, in the order of their first names."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    alike: dict[str, dict[str, Any]] = {}
    found = get_layers_from_vllm_config(config, AttentionLayerBase)
    for name, layer in sorted(found.items()):
        spec = layer.get_kv_cache_spec(config)
        if spec is None:
            continue
        backend = layer.get_attn_backend().get_name()
        entry = {"backend": backend, "isa": _isa(config, layer, spec), "spec": describe(spec)}
        entry = alike.setdefault(json.dumps(entry, sort_keys=True), {**entry, "layers": []})
        entry["layers"].append(name)
    if not alike:
        raise LookupError("no layer with a KV cache is registered")
    return list(alike.values())


def _isa(config: VllmConfig, layer: Any, spec: Any) -> str | None:
    """The instruction set that a CPU backend packs its KV for; its bytes differ."""
    if not current_platform.is_cpu():
        return None
    if hasattr(layer, "isa"):  # set by vLLM once it has made the attention metadata builder
        return str(layer.isa)
    if not hasattr(spec, "head_size"):
        return platform.machine()
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = config.model_config.dtype, config.cache_config.cache_dtype
    return str(_get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype))


def describe(value: Any) -> Any:
    """A KV spec (a tree of dataclasses) as plain data; its class is its `kind`."""
    found: Any
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        found["kind"] = type(value).__name__
    elif isinstance(value, enum.Enum):  # before int: some of them are integers too
        found = value.name
    elif value is None or isinstance(value, (bool, int, float, str)):
        found = value
    elif isinstance(value, Mapping):
        found = {str(key): describe(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        found = [describe(item) for item in value]
    elif isinstance(value, (set, frozenset)):
        found = sorted(str(describe(item)) for item in value)
    elif hasattr(value, "__dict__"):
        found = {"kind": type(value).__name__, **describe(vars(value))}
    else:
        found = model_facts.text(value)  # torch dtypes, fractions
    return found


def _pages(kv_caches: CanonicalKVCaches) -> dict[str, Any]:
    """Pages of a row in their order, and which of them each group's layers own."""
    refs = [
        [(ref.tensor_idx, ref.page_size_bytes) for ref in group]
        for group in kv_caches.group_data_refs
    ]
    return {
        "bytes": _runs(tensor.page_size_bytes for tensor in kv_caches.tensors),
        "refs": _digest(refs),
    }


def _canonical(
    config: VllmConfig, spec: Any, kv_caches: CanonicalKVCaches
) -> dict[str, Any] | None:
    """What describes vLLM's portable layout, if every layer of it is certified here."""
    refs = [ref for group in kv_caches.group_data_refs for ref in group]
    if not spec.config.canonical_layout or not refs:
        return None
    mappings = [ref.mapping for ref in refs]
    if not all(mapping is not None and mapping.parallelism_agnostic for mapping in mappings):
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping

    owners = [(r.tensor_idx, r.mapping.canonical_page_size_bytes) for r in refs]
    return {
        "format": canonical_mapping.canonical_format_id(spec.config.kv_cache_layout),
        "pages": _runs(size for _, size in owners),
        "refs": _digest(owners),
        "kv_heads": config.model_config.get_total_num_kv_heads(),
    }


def _runs(sizes: Iterable[int]) -> list[list[int]]:
    """Run lengths: [[count, bytes], ...]."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return runs


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _platform(kv_dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {"device": current_platform.device_type}
    if current_platform.is_rocm():
        found["device"] = "rocm"
    if current_platform.is_cpu():
        found["machine"] = platform.machine()
    if kv_dtype.startswith("fp8"):
        # Two formats go by this name: some AMD devices have no negative zero.
        found["fp8"] = str(current_platform.fp8_dtype()).removeprefix("torch.")
    return found


def _interleave(parallel: Any) -> dict[str, Any] | None:
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size == 1:
        return None
    return {
        "cp": parallel.cp_kv_cache_interleave_size,
        "dcp": getattr(parallel, "dcp_kv_cache_interleave_size", None),
    }


def _lora_path_in_keys() -> bool:
    """Whether vLLM's block hashes tell apart one adapter name at two paths (0.31 on)."""
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    probe = SimpleNamespace(lora_request=SimpleNamespace(lora_name="name", lora_path="path"))
    return "path" in repr(_gen_lora_extra_hash_keys(probe))


def _hashing(cache: Any) -> dict[str, Any]:
    algorithm = str(cache.prefix_caching_hash_algo)
    if os.environ.get("PYTHONHASHSEED") is not None:
        seed = "PYTHONHASHSEED"
    else:
        seed = "random" if algorithm in _RANDOM_SEED_HASHES else "fixed"
    return {"algorithm": algorithm, "seed": seed}
