# SPDX-License-Identifier: Apache-2.0
"""The two sides of a transfer: vLLM's KV cache tensors and the rows of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_tiered_offload.worker.plan import Fragment, GroupTable

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )


class Region(Protocol):
    """What a transfer worker needs of the shared region."""

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor: ...
    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor: ...
    def cleanup(self) -> None: ...


def device_rows(cache: CanonicalKVCacheTensor) -> torch.Tensor:
    """The KV cache tensor as int8 rows, one block each: (blocks, page bytes).

    Rows may be strided (packed layouts), bytes of a row may not. Raises ValueError
    for a tensor that is not on the CPU or whose rows are not plain bytes.
    """
    page = cache.page_size_bytes
    if cache.tensor.device.type != "cpu":
        raise ValueError(
            f"KV cache tensor is on {cache.tensor.device}, the host worker needs cpu"
        )
    rows = cache.tensor.view(torch.int8)
    if rows.ndim != 2 or rows.shape[1] != page:
        rows = rows.view(-1, page)
    if rows.stride(1) != 1:
        raise ValueError(f"KV cache rows have a byte stride of {rows.stride(1)}, need 1")
    return rows


def host_pages(kv_caches: CanonicalKVCaches, canonical: bool) -> list[int]:
    """Bytes that one block takes in the pool, for every tensor.

    The canonical layout takes them from the mappings, which every reference must have
    (ValueError otherwise): a canonical page holds the bytes of all ranks.
    """
    if not canonical:
        return [t.page_size_bytes for t in kv_caches.tensors]
    pages = [0] * len(kv_caches.tensors)
    for ref in (r for refs in kv_caches.group_data_refs for r in refs):
        if ref.mapping is None:
            raise ValueError(
                "canonical_layout: this KV cache layout has no canonical mapping; "
                "remove canonical_layout from kv_connector_extra_config"
            )
        pages[ref.tensor_idx] = max(
            pages[ref.tensor_idx], ref.mapping.canonical_page_size_bytes
        )
    return pages


def host_rows(
    pages: Sequence[int],
    blocks_per_chunk: int,
    num_chunks: int,
    region: Region | None,
    canonical: bool,
) -> list[torch.Tensor]:
    """One int8 view (chunks, page bytes * blocks_per_chunk) for every tensor, in order.

    Without a region they are plain tensors of this process.
    """
    sizes = [page * blocks_per_chunk for page in pages]
    if region is None:
        return [torch.zeros((num_chunks, size), dtype=torch.int8) for size in sizes]
    if canonical:
        return [region.create_next_canonical_view(size) for size in sizes]
    return [region.create_next_worker_view(size) for size in sizes]


def group_tables(
    refs_of_groups: Sequence[Sequence[CanonicalKVCacheRef]],
    device: Sequence[torch.Tensor],
    host: Sequence[torch.Tensor],
    pages: Sequence[int],
    canonical: bool,
) -> list[GroupTable]:
    """Every group's fragments, from its references to tensors."""

    def fragments(ref: CanonicalKVCacheRef) -> list[Fragment]:
        dev, row = device[ref.tensor_idx], host[ref.tensor_idx]
        page = Fragment(
            dev.data_ptr(), dev.stride(0), row.data_ptr(), row.stride(0), pages[ref.tensor_idx],
            ref.page_size_bytes,
        )  # fmt: skip
        if not canonical:
            if ref.page_size_bytes > dev.shape[1]:
                raise ValueError(
                    f"page of {ref.page_size_bytes} bytes in rows of {dev.shape[1]}"
                )
            return [page]
        return mapped_fragments(page, ref)

    return [GroupTable([f for ref in refs for f in fragments(ref)]) for refs in refs_of_groups]


def mapped_fragments(page: Fragment, ref: CanonicalKVCacheRef) -> list[Fragment]:
    """A page cut into the runs of its canonical mapping."""
    mapping = ref.mapping
    assert mapping is not None
    return [
        page._replace(
            device=page.device + run.local_offset + i * run.local_stride,
            host=page.host + run.canonical_offset + i * run.canonical_stride,
            size=run.fragment_size,
            writers=mapping.num_writers,
            writer=mapping.writer_index,
        )
        for run in mapping.runs
        for i in range(run.num_fragments)
    ]
