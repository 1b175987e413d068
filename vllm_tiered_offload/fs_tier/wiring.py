# SPDX-License-Identifier: Apache-2.0
"""What the tier's constructor is given, turned into what the store wants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger

from vllm_tiered_offload.config import ConfigError, FsTierSettings
from vllm_tiered_offload.config.fs_tier import TIER_TYPE
from vllm_tiered_offload.config.spec import tier_prefix
from vllm_tiered_offload.fs_tier.adapters import tagging_enabled
from vllm_tiered_offload.fs_tier.identity import Identity, layout_of, resolve_namespace
from vllm_tiered_offload.fs_tier.manifest import check_stored_manifests
from vllm_tiered_offload.store import ChunkStore, Namespace, StoreSettings
from vllm_tiered_offload.store.syscalls import explain

logger = init_logger("vllm.tiered_offload.fs_tier")


def read_settings(config: Mapping[str, Any], offloading_spec: Any) -> FsTierSettings:
    """Settings from the constructor's keywords.

    A misspelt key is refused, a keyword that a newer vLLM's factory adds is ignored; they are
    told apart by what the user wrote, as far as the spec still knows it.

    Raises:
        ConfigError: an unknown key, a bad value, a root that cannot be used.
    """
    prefix = key_prefix(config, offloading_spec)
    user_tiers = _tier_configs(offloading_spec)
    settings, ignored = FsTierSettings.from_keywords(config, user_tiers, prefix)
    if ignored:
        logger.info("ignored, unknown to this tier: %s", ", ".join(ignored))
    settings.check_root_dirs(prefix)
    return settings


def resolve_identity(
    settings: FsTierSettings, offloading_spec: Any, row_bytes: int
) -> Identity:
    """The namespace of this engine; in vLLM's own spec there are no facts to identify it by."""
    return resolve_namespace(
        getattr(offloading_spec, "identity_facts", None),
        layout_of(offloading_spec.config, row_bytes),
        cache_namespace=settings.cache_namespace,
        lora_adapters_immutable=settings.lora_adapters_immutable,
        adapters_tagged=tagging_enabled(),
    )


def _tier_configs(offloading_spec: Any) -> list[dict[str, Any]]:
    configs = getattr(offloading_spec, "secondary_tier_configs", None)
    if configs is None:
        configs = (getattr(offloading_spec, "extra_config", None) or {}).get("secondary_tiers")
    return [entry for entry in configs or [] if isinstance(entry, dict)]


def _place(config: Mapping[str, Any], offloading_spec: Any) -> int | None:
    """Where in the user's `secondary_tiers` the tier with these keywords is."""
    for index, entry in enumerate(_tier_configs(offloading_spec)):
        if entry.get("root_dir") == config.get("root_dir"):
            return index
    return None


def tier_label(tier_type: str, config: Mapping[str, Any], offloading_spec: Any) -> str:
    """The label vLLM's own tiering metrics give this tier, e.g. "1:odirect_fs"."""
    index = _place(config, offloading_spec)
    return tier_type if index is None else f"{index + 1}:{tier_type}"


def key_prefix(config: Mapping[str, Any], offloading_spec: Any) -> str:
    """How errors call this tier's keys: as the user finds them in the configuration."""
    index = _place(config, offloading_spec)
    return f"{TIER_TYPE}." if index is None else tier_prefix(index)


def with_failure_threshold(detector: Any | None) -> Any | None:
    """Give the detector the failure threshold that vLLM gives its own storage tiers.

    vLLM 0.33 fills in that default by tier type, for "fs" and "obj" only; without it a full
    disk would be offered every store for ever.
    """
    default = getattr(detector, "DEFAULT_FAILURE_THRESHOLD", None)
    if default is not None and getattr(detector, "_failure_threshold", default) is None:
        detector._failure_threshold = default  # type: ignore[union-attr]
    return detector


def emits_events(settings: FsTierSettings, offloading_spec: Any) -> bool:
    """Whether to emit KV events; a wish that the engine's configuration defeats is logged."""
    if not settings.enable_kv_events:
        return False
    if offloading_spec.kv_events_config.enable_kv_cache_events:
        return True
    logger.warning(
        "enable_kv_events is set but KV cache events are disabled in vLLM: none sent"
    )
    return False


def chunk_bytes(rows: memoryview) -> int:
    """Bytes of one row of the CPU tier's view, padding included."""
    if rows.strides is None or rows.ndim != 2:
        raise ValueError(f"primary_kv_view: {rows.ndim} dimensions, must be (chunks, bytes)")
    return int(rows.strides[0])


def padding_bytes(offloading_spec: Any, row_bytes: int) -> int:
    """Bytes of a row that hold no KV: alignment at its end. 0 where the spec does not say."""
    page = getattr(offloading_spec, "cpu_page_size_per_worker", None)
    config = getattr(offloading_spec, "config", None)
    if page is None or config is None:
        return 0
    copies = 1 if offloading_spec.replicated_layout else config.parallel.world_size
    return max(0, row_bytes - int(page) * int(copies))


def open_store(
    settings: FsTierSettings,
    namespace: Namespace,
    memory: memoryview,
    row_bytes: int,
    *,
    events: bool,
    prefix: str = f"{TIER_TYPE}.",
) -> ChunkStore:
    """Open the roots, recover their index and start the I/O threads.

    `prefix` is how errors call the tier's keys.

    Raises:
        ConfigError: a root is missing, not writable, too small, ...
        IdentityError: a root's manifest contradicts the namespace.
    """
    try:
        check_stored_manifests(settings.root_dir, namespace)
        store_settings = _store_settings(settings)
        return ChunkStore(store_settings, namespace, memory, row_bytes, events=events)
    except OSError as error:
        raise _as_config_error(error, settings, prefix) from error


def _as_config_error(error: OSError, settings: FsTierSettings, prefix: str) -> ConfigError:
    """The line of a store that cannot be opened, under the key that it is about."""
    text = str(error).removeprefix("root_dir ")
    if error.errno is not None:
        where = error.filename or ", ".join(map(str, settings.root_dir))
        text = f"{where}: {explain(error)}"
    about = re.search(r"\b(max_bytes|min_free_bytes|direct_io) = ", text)
    if "; " not in text:
        text += "; it must be a directory on a disk that the engine can read and write"
    return ConfigError(f"{prefix}{about[1] if about else 'root_dir'}", text)


def _store_settings(settings: FsTierSettings) -> StoreSettings:
    return StoreSettings(
        root_dirs=settings.root_dir,
        max_bytes=settings.max_bytes,
        min_free_bytes=settings.min_free_bytes,
        io_bytes=settings.io_bytes,
        read_threads=settings.n_read_threads,
        write_threads=settings.n_write_threads,
        store_queue_bytes=settings.store_queue_bytes,
        refresh_interval=settings.refresh_interval,
        stall_timeout=settings.stall_timeout,
        mode=settings.mode,
        direct_io=settings.direct_io,
        exclusive=settings.exclusive,
    )
