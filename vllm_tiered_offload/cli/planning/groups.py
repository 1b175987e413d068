# SPDX-License-Identifier: Apache-2.0
"""How vLLM lays a model's KV out in blocks: groups of layers and bytes per block.

vLLM gives every KV group blocks of one size. Layers of one kind are one group; a hybrid's
layers are split into groups of equal length, and a group with smaller pages gets more
tokens in a block. A chunk belongs to one group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from vllm_tiered_offload.cli.planning.layers import Layer

# vLLM's rule against too many padding layers.
_NEARLY_EQUAL = 1.5


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of tensor, pipeline and decode-context parallelism."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share block tables; `tokens_per_block` of them in one block."""

    kind: str
    layers: int
    tokens_per_block: int


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """One worker's blocks; `replicated`: all workers hold the same bytes."""

    groups: tuple[KvGroup, ...]
    worker_kv_bytes_per_block: int
    replicated: bool


def layout_blocks(
    layers: tuple[Layer, ...], block_size: int, kv_bytes: int, parallel: Parallel
) -> KvBlocks:
    """The blocks of a worker for these layers.

    Args:
        block_size: tokens per block, as `--block-size`.
        kv_bytes: bytes of one number of the KV cache.
    """
    kept = [layer for layer in layers if layer.kind != "state"]
    pages = [_page_bytes(layer, block_size, kv_bytes, parallel.tp) for layer in kept]
    tokens = block_size * parallel.dcp
    if len({(layer.kind, layer.window) for layer in kept}) == 1:
        per_block = _largest_stage(pages, parallel.pp)
        groups: tuple[KvGroup, ...] = (KvGroup(kept[0].kind, len(kept), tokens),)
    else:
        groups, per_block = _hybrid(kept, pages, tokens, parallel.pp)
    replicated = parallel.tp > 1 and parallel.pp == 1 and all(layer.latent for layer in kept)
    return KvBlocks(groups, per_block, replicated and parallel.dcp == 1)


def _page_bytes(layer: Layer, block_size: int, kv_bytes: int, tp: int) -> int:
    """One layer's part of a block; every worker holds at least one head."""
    heads = 1 if layer.latent else max(1, layer.heads // tp)
    return heads * layer.values * kv_bytes * block_size


def _largest_stage(pages: list[int], pp: int) -> int:
    """The bytes of the longest pipeline stage."""
    length = -(-len(pages) // pp)
    return max(sum(pages[i : i + length]) for i in range(0, len(pages), length))


def _hybrid(
    layers: list[Layer], pages: list[int], tokens: int, pp: int
) -> tuple[tuple[KvGroup, ...], int]:
    page = max(pages)
    buckets = Counter(
        (layer.kind, layer.window, page // own if page % own == 0 else 1)
        for layer, own in zip(layers, pages, strict=True)
    )
    shortest, longest = min(buckets.values()), max(buckets.values())
    length = longest if longest < shortest * _NEARLY_EQUAL else shortest
    groups = []
    for (kind, _, ratio), count in buckets.items():
        number = -(-count // length)
        for index in range(number):
            members = len(range(index, count, number))
            groups.append(KvGroup(kind, members, tokens * ratio))
    widest = max(group.layers for group in groups)
    return tuple(groups), -(-widest // pp) * page
