# SPDX-License-Identifier: Apache-2.0
"""KV caches, a pool and an obvious model of a transfer, for tests of transfer workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)


class PlainRegion:
    """Rows of plain memory with the views of a shared region; counts its clean-ups."""

    def __init__(self, chunks: int, row: int, slot: int, rank: int = 0) -> None:
        self.bytes = torch.randint(-128, 128, (chunks, row), dtype=torch.int8)
        self.offset, self.end = rank * slot, (rank + 1) * slot
        self.canonical_offset = 0
        self.cleanups = 0

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        start, self.offset = self.offset, self.offset + tensor_page_size
        assert self.offset <= self.end
        return self.bytes[:, start : self.offset]

    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
        start = self.canonical_offset
        self.canonical_offset += tensor_page_size
        assert self.canonical_offset <= self.bytes.shape[1]
        return self.bytes[:, start : self.canonical_offset]

    def cleanup(self) -> None:
        self.cleanups += 1


@dataclass(frozen=True)
class Shape:
    """Pages of the tensors in bytes, bytes between rows beyond a page, and the groups:
    for each of them (tensor, un-padded page) a layer.
    """

    pages: tuple[int, ...]
    groups: tuple[tuple[tuple[int, int], ...], ...]
    gap: int = 0

    @property
    def block_bytes(self) -> int:
        return sum(self.pages)


def kv_caches(shape: Shape, blocks: int, seed: int = 0) -> CanonicalKVCaches:
    """Random KV cache tensors of that shape."""
    random = torch.Generator().manual_seed(seed)
    tensors = []
    for page in shape.pages:
        rows = torch.randint(
            -128, 128, (blocks, page + shape.gap), dtype=torch.int8, generator=random
        )
        tensors.append(CanonicalKVCacheTensor(rows[:, :page], page))
    refs = [[CanonicalKVCacheRef(t, size) for t, size in group] for group in shape.groups]
    return CanonicalKVCaches(tensors, refs)


@dataclass(frozen=True)
class Transfer:
    """`blocks[g]` of every group, the request's number of the first, and all chunks."""

    blocks: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def spec(self) -> GPULoadStoreSpec:
        flat = [block for group in self.blocks for block in group]
        return GPULoadStoreSpec(flat, [len(g) for g in self.blocks], list(self.firsts))


def chunks_needed(count: int, first: int, blocks_per_chunk: int) -> int:
    """Chunks that blocks first .. first + count - 1 of a request touch."""
    if not count:
        return 0
    return (first + count - 1) // blocks_per_chunk - first // blocks_per_chunk + 1


def places(
    shape: Shape, transfer: Transfer, blocks_per_chunk: int
) -> list[tuple[int, int, int, int, int]]:
    """(tensor, block, chunk, byte in this rank's slot, bytes) of every page, one by one."""
    found = []
    chunks = iter(transfer.chunks)
    for group, blocks, first in zip(
        shape.groups, transfer.blocks, transfer.firsts, strict=True
    ):
        chunk = None
        for number, block in enumerate(blocks, start=first):
            if chunk is None or number % blocks_per_chunk == 0:
                chunk = next(chunks)
            for tensor, size in group:
                start = sum(shape.pages[:tensor]) * blocks_per_chunk
                start += number % blocks_per_chunk * shape.pages[tensor]
                found.append((tensor, block, chunk, start, size))
    assert next(chunks, None) is None
    return found


def expected_store(
    shape: Shape, caches: CanonicalKVCaches, pool: torch.Tensor, transfer: Transfer, factor: int
) -> torch.Tensor:
    """The pool (this rank's slots) after a store."""
    after = pool.clone()
    for tensor, block, chunk, start, size in places(shape, transfer, factor):
        after[chunk, start : start + size] = caches.tensors[tensor].tensor[block, :size]
    return after


def expected_load(
    shape: Shape, caches: CanonicalKVCaches, pool: torch.Tensor, transfer: Transfer, factor: int
) -> list[torch.Tensor]:
    """The KV cache tensors after a load."""
    after = [t.tensor.clone() for t in caches.tensors]
    for tensor, block, chunk, start, size in places(shape, transfer, factor):
        after[tensor][block, :size] = pool[chunk, start : start + size]
    return after


def random_transfer(
    rng: np.random.Generator,
    counts: Sequence[int],
    firsts: Sequence[int],
    factor: int,
    *,
    blocks: int,
    chunks: int,
) -> Transfer:
    """A transfer with blocks and chunks in random order, none of them twice."""
    ids = iter(rng.permutation(blocks).tolist())
    groups = tuple(tuple(next(ids) for _ in range(count)) for count in counts)
    need = sum(
        chunks_needed(count, first, factor) for count, first in zip(counts, firsts, strict=True)
    )
    return Transfer(groups, tuple(firsts), tuple(rng.permutation(chunks)[:need].tolist()))
