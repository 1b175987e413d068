# SPDX-License-Identifier: Apache-2.0
"""`AlignedTieringOffloadingSpec`: a CPU pool in the shared region, tiers below."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm_tiered_offload import compat, plugin, pool_metrics
from vllm_tiered_offload.manager import PinnedTieringManager, PinSettings
from vllm_tiered_offload.region.shared_region import SharedOffloadRegion
from vllm_tiered_offload.spec.aligned import AlignedSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingManager,
        OffloadingMetricMetadata,
    )
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

logger = init_logger("vllm.tiered_offload.spec")

# Selected by its module path, this spec runs where VLLM_PLUGINS left the plugin
# out; the tier's name has to be known there all the same.
plugin.register()


class AlignedTieringOffloadingSpec(AlignedSpec, TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec over our region and our manager.

    Any secondary tier that vLLM's factory knows works in it.
    """

    BLOCK_SIZE_ALIGNMENT = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
    TIERING: ClassVar[bool] = True
    _manager: OffloadingManager | None

    # What the workers found out about the model, one entry a rank, for the
    # tiers to identify a persistent cache by; None until the manager is made.
    identity_facts: list[dict[str, Any]] | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        ours = pool_metrics.metric_definitions()
        return {**super().build_metric_definitions(extra_config), **ours}

    def create_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        if self.config.canonical_layout:
            self._validate_canonical_refs(kv_caches)
        return super().create_worker(kv_caches)

    def get_manager(self) -> OffloadingManager:
        """The scheduler's manager; made once.

        Raises `RegionError` unless every worker has joined the region: a rank
        missing here (another host, an external launcher) would be a slot that
        nobody fills.
        """
        if self._manager is None:
            if not self.num_chunks:
                return CPUOffloadingSpec.get_manager(self)  # nothing to share or to cascade
            with contextlib.ExitStack() as undo:
                self._manager = self._make_manager(undo)
                undo.pop_all()
        return self._manager

    def _make_manager(self, undo: contextlib.ExitStack) -> OffloadingManager:
        region = SharedOffloadRegion(rank=None, **self._region_arguments())
        undo.callback(region.cleanup)
        region.require_ranks(self.config.parallel.world_size)
        self._scheduler_mmap = region
        self.identity_facts = [facts for _, facts in sorted(region.rank_facts.items())]
        primary = compat.call(
            CPUPrimaryTierOffloadingManager,
            num_chunks=self.num_chunks,
            mmap_region=region,
            cache_policy=self.eviction_policy,
            cache_policy_module_path=self.cache_policy_module_path,
            enable_events=self.kv_events_config.enable_kv_cache_events,
            info=getattr(self, "cpu_info", None),
        )
        tiers = self._make_tiers(primary.get_kv_memoryview(), undo)
        poll = {}
        if hasattr(self, "tier_poll_interval_s"):  # vLLM 0.33
            poll["tier_poll_interval_s"] = self.tier_poll_interval_s
        return PinnedTieringManager(primary, tiers, pins=self._pin_settings(), **poll)

    def _pin_settings(self) -> PinSettings:
        return PinSettings(
            max_share=self.settings.pin_share,
            deadline=self.settings.pin_deadline,
            patience=self.settings.patience,
            store_headroom=self.settings.store_headroom,
        )

    def _make_tiers(
        self, view: memoryview, undo: contextlib.ExitStack
    ) -> list[SecondaryTierManager]:
        tiers = []
        for config in self.secondary_tier_configs:
            tier = SecondaryTierFactory.create_secondary_tier(config, view, self)
            undo.callback(tier.shutdown)
            tiers.append(tier)
        return tiers
