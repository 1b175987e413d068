# SPDX-License-Identifier: Apache-2.0
"""Keys of one entry of `secondary_tiers` with the type `odirect_fs`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from vllm_tiered_offload.config.model import (
    Settings,
    key,
    raise_first,
    try_build,
    unknown_keys,
)
from vllm_tiered_offload.config.root_dirs import Access, StatVfs, root_problem
from vllm_tiered_offload.config.rules import (
    Choice,
    ConfigError,
    Count,
    Directories,
    Flag,
    Number,
    Object,
    Size,
    Text,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TIER_TYPE = "odirect_fs"
TIER_CLASS = "ODirectFsTier"
TIER_MODULE = "vllm_tiered_offload.fs_tier.manager"


class FsTierSettings(Settings):
    """One `odirect_fs` tier. Sizes are bytes, times are seconds."""

    type: str = key(
        Choice((TIER_TYPE, TIER_CLASS)),
        "Selects this tier. The class name is for use with `module_path`.",
        TIER_TYPE,
    )
    module_path: str | None = key(
        Text(),
        f"Where to import the class from when vLLM has not loaded the plugin: `{TIER_MODULE}`.",
        None,
    )
    root_dir: tuple[Path, ...] = key(
        Directories(),
        "Where the segments live. A list spreads them over several disks.",
    )
    max_bytes: int | None = key(
        Size(low=2 * MIB),
        "Exact bound on the bytes on disk, per root directory; the oldest segments are "
        "evicted. Without it only `min_free_bytes` bounds the tier.",
        None,
    )
    min_free_bytes: int | None = key(
        Size(),
        "Room left for others on each file system. Without it and without `max_bytes`: "
        "10 % of the file system.",
        None,
    )
    io_bytes: int = key(
        Size(low=64 * KIB, high=GIB, multiple=4 * KIB),
        "Largest single read or write.",
        16 * MIB,
    )
    n_read_threads: int = key(Count(1, 64), "Threads that read, over all roots.", 4)
    n_write_threads: int | None = key(
        Count(1, 16),
        "Threads that write, per root, each to a segment of its own. Without it: 2 where the "
        "root has room for 128 segments (32 GiB), else 1.",
        None,
    )
    store_queue_bytes: int = key(
        Size(low=64 * KIB),
        "Stores waiting for the disk; more are dropped and counted. Loads never are.",
        256 * MIB,
    )
    refresh_interval: float = key(
        Number(0.05, 3600, "seconds"),
        "How often to look for chunks of other processes, and to publish one's own.",
        1.0,
    )
    stall_timeout: float = key(
        Number(0.1, 3600, "seconds"),
        "When the oldest operation is older than this, look-ups answer MISS until it moves.",
        10.0,
    )
    mode: Literal["read_write", "read"] = key(
        Choice(("read_write", "read")), "`read` never writes to the root.", "read_write"
    )
    direct_io: Literal["auto", "on", "off"] = key(
        Choice(("auto", "on", "off")),
        "`auto` probes each root and falls back to buffered I/O, where `on` refuses to start.",
        "auto",
    )
    exclusive: bool = key(
        Flag(),
        "You vouch that one process uses the root: for file systems where locks do not work.",
        False,
    )
    cache_namespace: str | None = key(
        Text(),
        "Added to the identity of the cache. Needed for a cache that survives a restart where "
        "the weights cannot be identified (object stores, vLLM's own spec).",
        None,
    )
    on_reset: Literal["new_epoch", "keep"] = key(
        Choice(("new_epoch", "keep")),
        "After `reset_cache`: `new_epoch` serves nothing stored before; `keep` is for "
        "deployments whose weights never change while they run.",
        "new_epoch",
    )
    lora_adapters_immutable: bool = key(
        Flag(),
        "You vouch that an adapter's weights never change under one name and path; only then "
        "is the KV of requests with adapters kept across restarts.",
        False,
    )
    enable_kv_events: bool = key(
        Flag(), "Publish BlockStored and BlockRemoved for chunks on disk.", False
    )
    locality: Literal["LOCAL", "REMOTE"] | None = key(
        Choice(("LOCAL", "REMOTE")),
        "What vLLM's events and load filters say about the disk: of this host, or shared.",
        None,
    )
    backpressure: Mapping[str, Any] | None = key(
        Object(), "vLLM's store backpressure for this tier.", None
    )

    @classmethod
    def parse(
        cls, tier_config: Mapping[str, Any], prefix: str = f"{TIER_TYPE}."
    ) -> FsTierSettings:
        """Settings from the user's own entry of `secondary_tiers`.

        Raises:
            ConfigError: an unknown key, a bad value or a combination that cannot work.
        """
        settings, problems = cls.try_parse(tier_config, prefix)
        raise_first(problems)
        assert settings is not None
        return settings

    @classmethod
    def try_parse(
        cls, tier_config: Mapping[str, Any], prefix: str = f"{TIER_TYPE}."
    ) -> tuple[FsTierSettings | None, list[ConfigError]]:
        """As `parse`, with every problem there is; no settings where a value is bad."""
        settings, problems = try_build(cls, tier_config, prefix)
        if settings is not None:
            problems += settings._bad_combinations(prefix)
        return settings, problems

    @classmethod
    def from_keywords(
        cls,
        keywords: Mapping[str, Any],
        user_tiers: Iterable[Any] = (),
        prefix: str = f"{TIER_TYPE}.",
    ) -> tuple[FsTierSettings, tuple[str, ...]]:
        """Settings from what vLLM's tier factory passes, and the keywords ignored.

        The factory may add keywords of its own in a newer vLLM; those are ignored. A key
        that the user typed is not: `user_tiers` is the raw `secondary_tiers` list, and
        what appears there and is unknown is refused as in `parse`.
        """
        known = {k: v for k, v in keywords.items() if k in cls.model_fields}
        extra = tuple(k for k in keywords if k not in cls.model_fields)
        for tier in user_tiers:
            if is_fs_tier(tier):
                typed = [name for name in tier if name in extra]
                raise_first(unknown_keys(typed, cls.model_fields, prefix))
        return cls.parse(known, prefix), extra

    def _bad_combinations(self, prefix: str) -> Iterator[ConfigError]:
        if self.module_path not in (None, TIER_MODULE):
            yield ConfigError(
                f"{prefix}module_path",
                f"{self.module_path!r} does not hold this tier; it must be {TIER_MODULE!r}",
            )
        if self.store_queue_bytes < self.io_bytes:
            yield ConfigError(
                f"{prefix}store_queue_bytes",
                f"{self.store_queue_bytes} is below io_bytes ({self.io_bytes}); one write "
                "would never fit",
            )
        if self.exclusive and self.mode == "read":
            yield ConfigError(
                f"{prefix}exclusive",
                "true makes no sense with mode 'read'; readers need no lock",
            )

    def root_problems(
        self,
        prefix: str = f"{TIER_TYPE}.",
        access: Access = os.access,
        statvfs: StatVfs = os.statvfs,
    ) -> list[ConfigError]:
        """What is wrong with each root: a file, not writable, on a file system without room."""
        found = (
            root_problem(root, f"{prefix}root_dir", self.mode, access, statvfs)
            for root in self.root_dir
        )
        return [problem for problem in found if problem is not None]

    def check_root_dirs(self, prefix: str = f"{TIER_TYPE}.", **calls: Any) -> None:
        """Look at each root without touching it, before any memory is taken.

        Raises:
            ConfigError: the first of `root_problems`.
        """
        raise_first(self.root_problems(prefix, **calls))


def is_fs_tier(tier_config: object) -> bool:
    """Whether this entry of `secondary_tiers` is ours, by type or by class and module."""
    if not isinstance(tier_config, Mapping):
        return False
    if tier_config.get("type") == TIER_TYPE:
        return True
    module = tier_config.get("module_path")
    return tier_config.get("type") == TIER_CLASS and str(module).startswith(
        "vllm_tiered_offload"
    )
