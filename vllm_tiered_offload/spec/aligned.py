# SPDX-License-Identifier: Apache-2.0
"""What both specs add to vLLM's: validated settings and page-aligned chunks.

A mixin placed before vLLM's own spec class. vLLM's arithmetic reads
`self.BLOCK_SIZE_ALIGNMENT`, so setting it is all that sizing needs; metric
definitions, backpressure, replicated and canonical layouts stay vLLM's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_tiered_offload.config import ConfigError, SpecSettings
from vllm_tiered_offload.region.shared_region import RegionSettings, SharedOffloadRegion
from vllm_tiered_offload.region.topology import refuse_other_hosts
from vllm_tiered_offload.spec.facts import collect_facts
from vllm_tiered_offload.worker.host import HostOffloadingWorker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = init_logger("vllm.tiered_offload.spec")


class AlignedSpec:
    """Mixin: `class Spec(AlignedSpec, <vLLM's spec>)`.

    `BLOCK_SIZE_ALIGNMENT` (bytes) is the least alignment of a chunk; the key
    `block_size_alignment` may raise it, and a pool in the shared region is
    page-aligned whatever it says.
    """

    BLOCK_SIZE_ALIGNMENT: int = 1
    TIERING: ClassVar[bool] = False

    # Set by vLLM's spec classes.
    config: OffloadingConfig
    num_chunks: int
    blocks_per_chunk: int
    kv_bytes_per_chunk: int
    cpu_page_size_per_worker: int
    replicated_layout: bool
    _worker: OffloadingWorker | None

    def __init__(self, config: OffloadingConfig) -> None:
        self.settings = SpecSettings.parse(config.extra_config, tiering=self.TIERING)
        self.BLOCK_SIZE_ALIGNMENT = self._alignment()
        self.settings.check_root_dirs()
        if self._uses_shared_region():
            # None in a scheduler behind the stock connector; its workers know.
            known = get_current_vllm_config_or_none()
            refuse_other_hosts(known and known.parallel_config)
        extra = self.settings.vllm_extra_config()
        if "secondary_tiers" in extra:
            # vLLM merges backpressure defaults into these dictionaries; the
            # user's own are shared by every spec of this process.
            extra["secondary_tiers"] = [dict(tier) for tier in extra["secondary_tiers"]]
        super().__init__(dataclasses.replace(config, extra_config=extra))  # type: ignore[call-arg]
        self._check_pool()

    def _alignment(self) -> int:
        raised = self.settings.block_size_alignment or 1
        wanted = max(type(self).BLOCK_SIZE_ALIGNMENT, raised)
        if not self._uses_shared_region():
            return wanted
        page = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
        return -(-wanted // page) * page

    def _uses_shared_region(self) -> bool:
        return super()._uses_shared_region()  # type: ignore[misc, no-any-return]

    def _check_pool(self) -> None:
        if self.kv_bytes_per_chunk and not self.num_chunks:
            raise ConfigError(
                "kv_connector_extra_config.cpu_bytes_to_use",
                f"{self.settings.cpu_bytes_to_use} bytes hold no chunk; "
                f"one chunk is {self.kv_bytes_per_chunk} bytes",
            )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The transfer worker of this rank; made once.

        vLLM's own method refuses the CPU platform, ours has a worker for it.
        """
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
            self._log_sizing()
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A new transfer worker over this rank's slot of the pool.

        On the CPU platform ours; elsewhere vLLM's, whose pinning and copying
        are tested on real devices.
        """
        region = self._open_region(kv_caches)
        try:
            return self._make_worker(kv_caches, region)
        except BaseException:
            if region is not None:
                region.cleanup()
            raise

    def _open_region(self, kv_caches: CanonicalKVCaches) -> SharedOffloadRegion | None:
        if not self._uses_shared_region() or not self.num_chunks:
            return None
        rank = self.config.parallel.rank
        return SharedOffloadRegion(
            rank=0 if self.replicated_layout else rank,
            joining_rank=rank,
            scheduler_joins=self.TIERING,
            # Only tiers outlive the engine and have to know what they keep.
            facts=collect_facts(self, kv_caches) if self.TIERING else None,
            **self._region_arguments(),
        )

    def _region_arguments(self) -> dict[str, Any]:
        return {
            "engine_id": self.config.engine_id,
            "num_chunks": self.num_chunks,
            "kv_bytes_per_chunk": self.kv_bytes_per_chunk,
            "cpu_page_size": self.cpu_page_size_per_worker,
            "world_size": self.config.parallel.world_size,
            "settings": RegionSettings(
                backing=self.settings.region_backing,
                huge_pages=self.settings.huge_pages,
                prefault=self.settings.prefault,
                join_timeout=self.settings.region_join_timeout,
            ),
        }

    def _make_worker(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion | None
    ) -> OffloadingWorker:
        canonical = self.config.canonical_layout
        if current_platform.is_cpu():
            return HostOffloadingWorker(
                kv_caches, self.blocks_per_chunk, self.num_chunks, region, canonical
            )
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

        return CPUOffloadingWorker(
            kv_caches=kv_caches,
            blocks_per_chunk=self.blocks_per_chunk,
            num_cpu_chunks=self.num_chunks,
            mmap_region=region,
            canonical_layout=canonical,
        )

    def _log_sizing(self) -> None:
        parallel = self.config.parallel
        copies = 1 if self.replicated_layout else parallel.world_size
        used = self.cpu_page_size_per_worker * copies
        logger.info(
            "Sized the CPU pool in worker %d of %d: %d chunks of %d bytes "
            "(%d used, %d padding (%.1f %%), alignment %d), %d of %d bytes",
            parallel.rank,
            parallel.world_size,
            self.num_chunks,
            self.kv_bytes_per_chunk,
            used,
            self.kv_bytes_per_chunk - used,
            100 * (1 - used / self.kv_bytes_per_chunk) if used else 0.0,
            self.BLOCK_SIZE_ALIGNMENT,
            self.num_chunks * self.kv_bytes_per_chunk,
            self.settings.cpu_bytes_to_use,
        )
