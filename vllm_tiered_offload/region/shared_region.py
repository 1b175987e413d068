# SPDX-License-Identifier: Apache-2.0
"""The memory that all workers of one engine and its scheduler share.

The interface is that of vLLM's class of the same name (0.30 to 0.33), so that
vLLM's transfer worker and primary tier work over it unchanged.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_tiered_offload.region import opening, pinning
from vllm_tiered_offload.region.layout import Layout, Range
from vllm_tiered_offload.region.roster import name_ranks
from vllm_tiered_offload.region.seat import logger
from vllm_tiered_offload.region.settings import RegionError, RegionSettings

if TYPE_CHECKING:
    import torch

__all__ = ["RegionError", "RegionSettings", "SharedOffloadRegion"]


class SharedOffloadRegion:
    """One mapping of the region, in one process.

    Every worker of an engine makes one with its rank, in any order; the first
    creates the memory. The constructor waits a while (30 s, or the shorter
    `join_timeout`) for all `world_size` workers, so they construct concurrently;
    one that comes later still gets the memory. The scheduler (`rank` None) comes
    when they are done, never creates the memory, and ends the hand-over.

    Raises `RegionError`, one line, for everything that cannot work.

    Args:
        engine_id: what the processes of one engine have in common; any string.
        num_chunks: rows.
        rank: this worker's slot in a row; None for the scheduler.
        kv_bytes_per_chunk: row stride in bytes, a multiple of the page size.
        cpu_page_size: bytes of one worker's slot.
        barrier: a collective of the workers, called exactly once whatever
            happens; then no scheduler is expected unless `scheduler_joins`.
        world_size: number of workers.
        joining_rank: the worker's true rank where all workers have slot 0.
        settings: backing, huge pages, pre-fault, patience.
        facts: JSON-able, handed over to the scheduler.
        creator_memory_check: called with the size in bytes before the memory is made.
        populate_shard: (index, count) of the share to pre-fault instead of the own.
        num_segments: accepted for vLLM's sake; one memory object has no segments.
        scheduler_joins: whether the region stays open for a scheduler.
    """

    BLOCK_SIZE_ALIGNMENT: int = mmap.PAGESIZE

    def __init__(  # noqa: PLR0917, vLLM's signature
        self,
        engine_id: str,
        num_chunks: int,
        rank: int | None,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
        barrier: Callable[[], None] | None = None,
        *,
        world_size: int = 1,
        joining_rank: int | None = None,
        settings: RegionSettings | None = None,
        facts: Mapping[str, object] | None = None,
        creator_memory_check: Callable[[int], None] | None = None,
        populate_shard: tuple[int, int] | None = None,
        num_segments: int = 1,
        scheduler_joins: bool | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._opened: opening.Opened | None = None
        self._base_tensor: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self.is_pinned = False
        self.pinned_addresses: list[int] = []
        self.rank = rank
        self.page_size = mmap.PAGESIZE
        request = opening.Request(
            engine_id=engine_id,
            rank=rank if joining_rank is None else joining_rank,
            slot=rank,
            world_size=world_size,
            settings=settings or RegionSettings(),
            facts=facts,
            scheduler_joins=barrier is None if scheduler_joins is None else scheduler_joins,
            memory_check=creator_memory_check,
            populate_shard=populate_shard,
        )
        try:
            self._layout = Layout(num_chunks, kv_bytes_per_chunk, cpu_page_size)
            if rank is not None:
                self._next_offset = self._layout.slot_offset(rank)
            self._opened = opening.open_region(request, self._layout)
        except BaseException:
            if barrier is not None:
                with contextlib.suppress(Exception):  # must not hide the first error
                    barrier()
            raise
        self._canonical_offset = 0
        self._meet_at(barrier)

    def _meet_at(self, barrier: Callable[[], None] | None) -> None:
        if barrier is None:
            return
        try:
            barrier()
        except BaseException:
            self.cleanup()
            raise

    # Sizes, by vLLM's names.

    @property
    def num_chunks(self) -> int:
        return self._layout.num_chunks

    @property
    def cpu_page_size(self) -> int:
        return self._layout.slot_bytes

    @property
    def _row_stride(self) -> int:
        return self._layout.row_bytes

    @property
    def total_size_bytes(self) -> int:
        return self._layout.total_bytes

    def iter_worker_slot_ranges(self) -> Iterator[Range]:
        """This worker's slot in each row as page-aligned (offset, length), in bytes."""
        assert self.rank is not None
        return self._layout.slot_ranges(self.rank)

    # Who is here.

    @property
    def joined_ranks(self) -> frozenset[int]:
        """Ranks of the workers that have the region mapped."""
        return frozenset(self.rank_facts)

    @property
    def rank_facts(self) -> dict[int, dict[str, Any]]:
        """What each worker handed over, by rank."""
        return dict(self._opened.ranks) if self._opened else {}

    def require_ranks(self, world_size: int) -> None:
        """Raise `RegionError` naming the ranks that have not joined on this host."""
        missing = sorted(set(range(world_size)) - self.joined_ranks)
        if missing:
            raise RegionError(
                f"{name_ranks(missing)} of {world_size} did not join the CPU pool: all workers "
                "have to be processes of this host (no other nodes, no external launcher)"
            )

    def describe(self) -> dict[str, object]:
        """Facts for the start-up line; sizes in bytes, times in seconds."""
        layout = self._layout
        facts: dict[str, object] = {
            "chunks": layout.num_chunks,
            "bytes_per_chunk": layout.row_bytes,
            "total_bytes": layout.total_bytes,
        }
        return facts | (self._opened.describe() if self._opened else {})

    # The memory.

    @property
    def _base(self) -> torch.Tensor | None:
        """All bytes as a flat int8 tensor; None once released."""
        if self._base_tensor is None and self._opened is not None:
            import torch

            self._base_tensor = torch.from_numpy(self._flat())
        return self._base_tensor

    @property
    def base_tensor(self) -> torch.Tensor:
        base = self._base
        if base is None:
            raise RuntimeError("the shared offload region has been released")
        return base

    def _flat(self) -> Any:
        if self._opened is None:
            raise RuntimeError("the shared offload region has been released")
        return self._opened.mapping.array()[: self._layout.total_bytes]

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next `tensor_page_size` bytes of this worker's slot, in every row.

        Called once for each tensor of the KV cache, in order. Returns int8 of
        shape (num_chunks, tensor_page_size) and stride (row stride, 1).
        """
        assert self.rank is not None
        start, end = self._next_offset, self._next_offset + tensor_page_size
        limit = self._layout.slot_offset(self.rank) + self._layout.slot_bytes
        if end > limit:
            raise RegionError(
                f"the tensors of rank {self.rank} take {end - limit} bytes more than its slot "
                f"of {self._layout.slot_bytes}"
            )
        self._next_offset = end
        return self._view(start, tensor_page_size)

    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next `tensor_page_size` bytes of every row, the same for all workers.

        For the canonical layout, where workers write disjoint bytes of one page.
        """
        start, end = self._canonical_offset, self._canonical_offset + tensor_page_size
        if end > self._layout.row_bytes:
            raise RegionError(
                f"the canonical tensors take {end - self._layout.row_bytes} bytes more than a "
                f"chunk of {self._layout.row_bytes}"
            )
        self._canonical_offset = end
        return self._view(start, tensor_page_size)

    def _view(self, offset: int, length: int) -> torch.Tensor:
        import torch

        shape, stride = (self.num_chunks, length), (self._row_stride, 1)
        view = torch.as_strided(self.base_tensor, shape, stride, storage_offset=offset)
        self._views.append(view)
        return view

    def create_kv_memoryview(self) -> memoryview:
        """All bytes as a memoryview of shape (num_chunks, row stride); nothing is copied."""
        return memoryview(self._flat().reshape(self.num_chunks, self._row_stride))

    def cleanup(self) -> None:
        """Release the region; idempotent. Memory in use elsewhere stays until let go."""
        opened, self._opened = self._opened, None
        if opened is None or os.getpid() != self._owner:
            return
        if self.is_pinned:
            pinning.unregister(self.pinned_addresses or [opened.mapping.address])
            self.pinned_addresses.clear()
            self.is_pinned = False
        self._views.clear()
        self._base_tensor = None
        if not opened.close():
            logger.debug("Region of rank %s: still in use, unmapped later", self.rank)
