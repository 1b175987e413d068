# SPDX-License-Identifier: Apache-2.0
"""A spec whose worker swaps the halves of every row before loading: a negative control."""

from __future__ import annotations

from typing import Any

from vllm_tiered_offload.spec.tiering import AlignedTieringOffloadingSpec


class SwappingSpec(AlignedTieringOffloadingSpec):
    def create_worker(self, kv_caches: Any) -> Any:
        worker = super().create_worker(kv_caches)
        load = worker.submit_load

        def submit_swapped(job_id: int, source: Any, target: Any, *rest: Any) -> bool:
            rows = self._scheduler_mmap.create_kv_memoryview() if self._scheduler_mmap else None
            if rows is None:
                rows = worker._region.create_kv_memoryview()
            flat = rows.cast("B")
            size = self.kv_bytes_per_chunk
            for chunk in source.block_ids.tolist():
                row = flat[chunk * size : (chunk + 1) * size]
                half = len(row) // 2
                first, second = bytes(row[:half]), bytes(row[half : 2 * half])
                row[:half], row[half : 2 * half] = second, first
            return load(job_id, source, target, *rest)

        worker.submit_load = submit_swapped
        return worker
