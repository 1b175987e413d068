# SPDX-License-Identifier: Apache-2.0
"""Keys of `kv_connector_extra_config` for the aligned specs."""

from __future__ import annotations

import difflib
import mmap
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PrivateAttr

from vllm_tiered_offload.config.fs_tier import GIB, TIER_TYPE, FsTierSettings, is_fs_tier
from vllm_tiered_offload.config.model import Settings, build, key
from vllm_tiered_offload.config.rules import (
    Choice,
    ConfigError,
    Flag,
    Number,
    Object,
    Objects,
    Size,
    Untouched,
    show,
)
from vllm_tiered_offload.pins import PinSettings

PINS = PinSettings()
TIERING_SPEC = "AlignedTieringOffloadingSpec"
PREFIX = "kv_connector_extra_config."
_TIERING_ONLY = ("secondary_tiers", "pin_share", "pin_deadline", "patience", "store_headroom")


class SpecSettings(Settings):
    """The pool, its region, the tiers and the manager. Sizes are bytes, times are seconds."""

    cpu_bytes_to_use: int = key(
        Size(low=1),
        "CPU memory for the pool, over all workers of the engine, padding included. "
        "`--kv-offloading-size` (GiB) sets it too.",
    )
    secondary_tiers: tuple[Mapping[str, Any], ...] = key(
        Objects(), "Tiers behind the pool: ours and vLLM's own, in order of look-up.", ()
    )
    block_size_alignment: int | None = key(
        Size(low=1, high=GIB, power_of_two=True),
        "Chunks are padded to a multiple of this. Without it: the page size where the pool "
        "is a shared region, else 1.",
        None,
    )
    region_backing: Literal["memfd", "shm"] = key(
        Choice(("memfd", "shm")),
        "What the pool's memory is: a memfd, or a file in /dev/shm.",
        "memfd",
    )
    huge_pages: Literal["auto", "off", "2MB", "1GB"] = key(
        Choice(("auto", "off", "2MB", "1GB")),
        "`auto` asks for transparent huge pages; the sizes take reserved ones.",
        "auto",
    )
    prefault: bool = key(Flag(), "Take all pages of the pool at start-up.", True)
    region_join_timeout: float = key(
        Number(1, 86400, "seconds"),
        "How long to wait for the engine's other processes to map the pool.",
        600.0,
    )
    pin_share: float = key(
        Number(0.01, 1, "share of the pool"),
        "Most of the pool that chunks read from disk may hold until their request starts.",
        PINS.max_share,
    )
    pin_deadline: float = key(
        Number(0.1, 86400, "seconds"),
        "How long a chunk read from disk stays held, and how long anyone waits for a read.",
        PINS.deadline,
    )
    patience: float = key(
        Number(0, 3600, "seconds"),
        "How long a request waits for room in the pool instead of recomputing; 0: never.",
        PINS.patience,
    )
    store_headroom: float = key(
        Number(0, 0.9, "share of the pool"),
        "Kept from reads so that stores find room.",
        PINS.store_headroom,
    )
    # What vLLM 0.30 to 0.33 read from the same object.
    spec_name: Any = key(Untouched(), "The spec class.", None)
    spec_module_path: Any = key(
        Untouched(), "Where to import the spec from when vLLM has not loaded the plugin.", None
    )
    blocks_per_chunk: Any = key(Untouched(), "GPU blocks in one chunk.", None)
    block_size: Any = key(
        Untouched(), "Tokens in one chunk, instead of `blocks_per_chunk`.", None
    )
    eviction_policy: Any = key(Untouched(), "Eviction policy of the pool.", None)
    cache_policy_module_path: Any = key(
        Untouched(), "Where to import an eviction policy of your own from.", None
    )
    store_threshold: Any = key(
        Untouched(), "Offers before a chunk is stored; CPU-only pool.", None
    )
    max_tracker_size: Any = key(Untouched(), "Entries that `store_threshold` remembers.", None)
    offload_prompt_only: Any = key(
        Untouched(), "vLLM's default, true, does not store generated tokens.", None
    )
    self_describing_kv_events: Any = key(Untouched(), "Events that carry the token ids.", None)
    canonical_layout: Any = key(
        Untouched(), "Chunks in a layout that does not depend on tensor parallelism.", None
    )
    backpressure: Mapping[str, Any] | None = key(
        Object(), "Default store backpressure of all tiers.", None
    )
    tier_poll_interval_s: Any = key(
        Untouched(), "Poll thread for tiers that need one (0.33).", None
    )
    sync_load_budget_bytes: Any = key(Untouched(), "Bytes loaded within a step (0.33).", None)

    _raw: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any], *, tiering: bool) -> SpecSettings:
        """Settings from `kv_connector_extra_config`, its `odirect_fs` entries checked too.

        Raises:
            ConfigError: an unknown key, a bad value or a combination that cannot work.
        """
        settings = build(cls, extra_config, PREFIX)
        settings._raw = extra_config
        _check_vllm_keys(extra_config, tiering)
        settings._check_combinations(extra_config, tiering)
        settings.fs_tiers()
        return settings

    def fs_tiers(self) -> list[FsTierSettings]:
        """The settings of every `odirect_fs` entry, in order."""
        return [
            FsTierSettings.parse(tier, _tier_prefix(index))
            for index, tier in enumerate(self.secondary_tiers)
            if is_fs_tier(tier)
        ]

    def check_root_dirs(self) -> None:
        """Look at the tiers' directories before memory is taken; raises ConfigError."""
        for index, tier in enumerate(self.secondary_tiers):
            if is_fs_tier(tier):
                prefix = _tier_prefix(index)
                FsTierSettings.parse(tier, prefix).check_root_dirs(prefix)

    def vllm_extra_config(self) -> dict[str, Any]:
        """The user's object with sizes as integers, for vLLM, which knows no units.

        Everything else is the user's own, the dictionaries of the tiers included (vLLM's
        spec merges its backpressure defaults into them in place).
        """
        return {**self._raw, "cpu_bytes_to_use": self.cpu_bytes_to_use}

    def _check_combinations(self, given: Mapping[str, Any], tiering: bool) -> None:
        if not tiering:
            for name in _TIERING_ONLY:
                if name in given:
                    raise ConfigError(
                        PREFIX + name, f"is not used here; it needs spec_name {TIERING_SPEC!r}"
                    )
        elif (self.block_size_alignment or mmap.PAGESIZE) % mmap.PAGESIZE:
            raise ConfigError(
                f"{PREFIX}block_size_alignment",
                f"{self.block_size_alignment} is below a page; a pool with tiers needs a "
                f"multiple of {mmap.PAGESIZE}",
            )
        if self.huge_pages in ("2MB", "1GB") and self.region_backing == "shm":
            raise ConfigError(
                f"{PREFIX}huge_pages",
                f"{self.huge_pages!r} needs region_backing 'memfd'; /dev/shm has none",
            )


def _tier_prefix(index: int) -> str:
    return f"{PREFIX}secondary_tiers[{index}]."


def _check_vllm_keys(given: Mapping[str, Any], tiering: bool) -> None:
    """The few checks that vLLM makes too late (or not) for keys of its own."""
    if given.get("blocks_per_chunk") is not None and given.get("block_size") is not None:
        raise ConfigError(
            f"{PREFIX}block_size", "and blocks_per_chunk exclude each other; give one of them"
        )
    for name in ("blocks_per_chunk", "block_size"):
        if (value := given.get(name)) is not None and not _is_positive_int(value):
            raise ConfigError(PREFIX + name, f"{show(value)} is not a whole number above 0")
    threshold = given.get("store_threshold", 0)
    if tiering and _is_positive_int(threshold) and int(threshold) >= 2:
        raise ConfigError(
            f"{PREFIX}store_threshold",
            f"{show(threshold)} is not supported with tiers; leave it out",
        )
    for index, tier in enumerate(given.get("secondary_tiers", ())):
        _check_tier_type(tier, f"{_tier_prefix(index)}type")


def _check_tier_type(tier: Mapping[str, Any], name: str) -> None:
    """Refuse a missing type, and a misspelling of ours; other plugins bring other types."""
    kind = tier.get("type")
    if not kind or not isinstance(kind, str):
        raise ConfigError(name, f'is missing; give a type such as "{TIER_TYPE}"')
    near = difflib.get_close_matches(kind.lower(), [TIER_TYPE], cutoff=0.75)
    if near and kind != TIER_TYPE and tier.get("module_path") is None:
        raise ConfigError(
            name, f"{show(kind)} is not a known type; did you mean '{TIER_TYPE}'?"
        )


def _is_positive_int(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and int(value) == float(value) and int(value) > 0
    except (TypeError, ValueError, OverflowError):
        return False
