# SPDX-License-Identifier: Apache-2.0
"""Keys of `kv_connector_extra_config` for the aligned specs."""

from __future__ import annotations

import difflib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import PrivateAttr

from vllm_tiered_offload.config.fs_tier import GIB, TIER_TYPE, FsTierSettings, is_fs_tier
from vllm_tiered_offload.config.model import Settings, key, raise_first, try_build
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
CPU_SPEC = "AlignedCPUOffloadingSpec"
PREFIX = "kv_connector_extra_config."
TIERING_ONLY = ("secondary_tiers", "pin_share", "pin_deadline", "patience", "store_headroom")


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
            ConfigError: the first unknown key, bad value or combination that cannot work.
        """
        settings, problems = cls.try_parse(extra_config, tiering=tiering)
        raise_first(problems)
        assert settings is not None
        return settings

    @classmethod
    def try_parse(
        cls, extra_config: Mapping[str, Any], *, tiering: bool
    ) -> tuple[SpecSettings | None, list[ConfigError]]:
        """As `parse`, with every problem there is; no settings where a value is bad."""
        settings, problems = try_build(cls, extra_config, PREFIX)
        if isinstance(extra_config, Mapping):
            problems += _bad_vllm_keys(extra_config, tiering)
        if settings is not None:
            settings._raw = extra_config
            problems += settings._bad_combinations(extra_config, tiering)
        for index, tier in tiers_of(extra_config):
            problems += _bad_tier(tier, tier_prefix(index))
        return settings, problems

    def fs_tiers(self) -> list[FsTierSettings]:
        """The settings of every `odirect_fs` entry, in order."""
        return [
            FsTierSettings.parse(tier, tier_prefix(index))
            for index, tier in enumerate(self.secondary_tiers)
            if is_fs_tier(tier)
        ]

    def check_root_dirs(self) -> None:
        """Look at the tiers' directories before memory is taken; raises ConfigError."""
        for index, tier in enumerate(self.secondary_tiers):
            if is_fs_tier(tier):
                prefix = tier_prefix(index)
                FsTierSettings.parse(tier, prefix).check_root_dirs(prefix)

    def vllm_extra_config(self) -> dict[str, Any]:
        """The user's object with sizes as integers, for vLLM, which knows no units.

        Everything else is the user's own, the dictionaries of the tiers included (vLLM's
        spec merges its backpressure defaults into them in place).
        """
        return {**self._raw, "cpu_bytes_to_use": self.cpu_bytes_to_use}

    def _bad_combinations(
        self, given: Mapping[str, Any], tiering: bool
    ) -> Iterator[ConfigError]:
        if not tiering:
            for name in TIERING_ONLY:
                if name in given:
                    yield ConfigError(
                        PREFIX + name, f"is not used here; it needs spec_name {TIERING_SPEC!r}"
                    )
        elif (self.block_size_alignment or mmap.PAGESIZE) % mmap.PAGESIZE:
            yield ConfigError(
                f"{PREFIX}block_size_alignment",
                f"{self.block_size_alignment} is below a page; a pool with tiers needs a "
                f"multiple of {mmap.PAGESIZE}",
            )
        if self.huge_pages in ("2MB", "1GB") and self.region_backing == "shm":
            yield ConfigError(
                f"{PREFIX}huge_pages",
                f"{self.huge_pages!r} needs region_backing 'memfd'; /dev/shm has none",
            )


def tier_prefix(index: int) -> str:
    """How the keys of one entry of `secondary_tiers` are called in errors."""
    return f"{PREFIX}secondary_tiers[{index}]."


def tiers_of(extra_config: object) -> list[tuple[int, Mapping[str, Any]]]:
    """The entries of `secondary_tiers` that are objects, each with its place in the list."""
    given = extra_config.get("secondary_tiers") if isinstance(extra_config, Mapping) else None
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return []
    return [(i, entry) for i, entry in enumerate(given) if isinstance(entry, Mapping)]


def _bad_vllm_keys(given: Mapping[str, Any], tiering: bool) -> Iterator[ConfigError]:
    """The few checks that vLLM makes too late (or not) for keys of its own."""
    if given.get("blocks_per_chunk") is not None and given.get("block_size") is not None:
        yield ConfigError(
            f"{PREFIX}block_size", "and blocks_per_chunk exclude each other; give one of them"
        )
    for name in ("blocks_per_chunk", "block_size"):
        if (value := given.get(name)) is not None and not _is_positive_int(value):
            yield ConfigError(PREFIX + name, f"{show(value)} is not a whole number above 0")
    threshold = given.get("store_threshold", 0)
    if tiering and _is_positive_int(threshold) and int(threshold) >= 2:
        yield ConfigError(
            f"{PREFIX}store_threshold",
            f"{show(threshold)} is not supported with tiers; leave it out",
        )


def _bad_tier(tier: Mapping[str, Any], prefix: str) -> Iterator[ConfigError]:
    """Our own tiers in full; of others a missing type, and a misspelling of ours."""
    kind = tier.get("type")
    if is_fs_tier(tier):
        yield from FsTierSettings.try_parse(tier, prefix)[1]
    elif not kind or not isinstance(kind, str):
        yield ConfigError(f"{prefix}type", f'is missing; give a type such as "{TIER_TYPE}"')
    elif tier.get("module_path") is None and difflib.get_close_matches(
        kind.lower(), [TIER_TYPE], cutoff=0.75
    ):
        yield ConfigError(
            f"{prefix}type", f"{show(kind)} is not a known type; did you mean '{TIER_TYPE}'?"
        )


def _is_positive_int(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and int(value) == float(value) and int(value) > 0
    except (TypeError, ValueError, OverflowError):
        return False
