# SPDX-License-Identifier: Apache-2.0
"""What fits where: chunks and tokens in each tier, and what the machine must have."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from vllm_tiered_offload.cli.planning.groups import KvBlocks, KvGroup, Parallel, layout_blocks
from vllm_tiered_offload.cli.planning.layers import ModelKv
from vllm_tiered_offload.cli.planning.model_config import ModelError
from vllm_tiered_offload.cli.planning.topology import check_parallel
from vllm_tiered_offload.spec.sizing import PoolSize, size_pool
from vllm_tiered_offload.store import StoreSettings, geometry
from vllm_tiered_offload.store import format as segment_format

MIB = 1 << 20
INDEX_BYTES_PER_CHUNK = 250
# Below this a chunk costs more to look up and to record than to move.
_SMALLEST_GOOD_CHUNK, _LONGEST_GOOD_CHUNK_TOKENS = 128 << 10, 256

# Bytes of a number; the names are those that vLLM's options take.
DTYPES = {"half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
KV_CACHE_DTYPES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for. `blocks_per_chunk` None takes the suggested one."""

    cpu_bytes: int
    disk_bytes: int
    block_size: int = 16
    blocks_per_chunk: int | None = None
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    parallel: Parallel = field(default_factory=Parallel)
    alignment: int = mmap.PAGESIZE
    io_bytes: int = 16 * MIB


@dataclass(frozen=True, slots=True)
class Choice:
    """One chunk size and what it means."""

    blocks_per_chunk: int
    tokens_per_chunk: int
    kv_bytes_per_chunk: int
    padding: int
    cpu_chunks: int
    cpu_tokens: int
    disk_chunks: int
    disk_tokens: int
    index_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole answer; bytes are integers."""

    model: ModelKv
    request: Request
    blocks: KvBlocks
    pool: PoolSize
    chosen: Choice
    choices: tuple[Choice, ...]
    suggested: int

    @property
    def kv_bytes_per_token(self) -> Fraction:
        """Over all workers and groups, padding left out."""
        per_block = Fraction(self.pool.kv_bytes_per_block)
        return sum(
            (per_block / group.tokens_per_block for group in self.blocks.groups), Fraction(0)
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "architecture": self.model.name,
            "exact": self.model.exact,
            "notes": list(self.model.notes),
            "kv_bytes_per_token": float(self.kv_bytes_per_token),
            "kv_groups": [asdict(group) for group in self.blocks.groups],
            "worker_kv_bytes_per_block": self.blocks.worker_kv_bytes_per_block,
            "replicated": self.blocks.replicated,
            "page_bytes_per_worker": self.pool.page_bytes_per_worker,
            "pool_bytes": self.pool.total_bytes,
            "suggested_blocks_per_chunk": self.suggested,
            **asdict(self.chosen),
            "choices": [asdict(choice) for choice in self.choices],
        }


def make_plan(model: ModelKv, request: Request) -> Plan:
    """Plan the tiers of `model`.

    Raises:
        ModelError: an unknown dtype, or a size of parallelism that vLLM refuses.
        ConfigError: the CPU budget is below one chunk.
    """
    check_parallel(model, request.parallel)
    kv_bytes = bytes_per_number(request)
    blocks = layout_blocks(model.layers, request.block_size, kv_bytes, request.parallel)
    suggested = suggest_blocks_per_chunk(blocks, request.parallel)
    wanted = request.blocks_per_chunk or suggested
    tried = sorted({1, 2, 4, 8, 16, suggested, wanted})
    choices = [choice for count in tried if (choice := _try(blocks, request, count))]
    pool = _size(blocks, request, wanted)
    chosen = _choice(blocks, request, wanted, pool)
    return Plan(model, request, blocks, pool, chosen, tuple(choices), suggested)


def bytes_per_number(request: Request) -> int:
    """Bytes of one number in the KV cache; vLLM runs float32 models in 16 bits by itself."""
    of_kv = _bytes_of(request.kv_cache_dtype, KV_CACHE_DTYPES, "--kv-cache-dtype")
    of_model = _bytes_of(request.dtype, DTYPES, "--dtype")
    return of_kv or of_model or 2


def _bytes_of(name: str, known: Mapping[str, int], option: str) -> int | None:
    if name != "auto" and name not in known:
        raise ModelError(
            f"{option}: {name!r} is not known here; give one of: auto, {', '.join(known)}"
        )
    return known.get(name)


def suggest_blocks_per_chunk(blocks: KvBlocks, parallel: Parallel) -> int:
    """One block, unless that makes chunks too small to be worth a record each.

    Hits are found in whole chunks, so a long chunk loses the end of a shared prefix.
    """
    copies = 1 if blocks.replicated else parallel.world_size
    block = blocks.worker_kv_bytes_per_block * copies
    tokens = min(group.tokens_per_block for group in blocks.groups)
    count = 1
    while block * count < _SMALLEST_GOOD_CHUNK and tokens * count * 2 <= (
        _LONGEST_GOOD_CHUNK_TOKENS
    ):
        count *= 2
    return count


def tokens_in(chunks: int, groups: tuple[KvGroup, ...], blocks_per_chunk: int) -> int:
    """Tokens of which every group's chunk fits into `chunks`."""
    per_token = sum(Fraction(1, g.tokens_per_block * blocks_per_chunk) for g in groups)
    return int(chunks / per_token)


def chunks_on_disk(disk_bytes: int, chunk_bytes: int, io_bytes: int) -> int:
    """Chunks that a root of `disk_bytes` holds, its records and free ends counted."""
    least = geometry.least_slots(StoreSettings(root_dirs=(Path("/"),)))
    segment = geometry.choose_segment_bytes(
        disk_bytes, chunk_bytes, segment_format.MIN_PAGE_BYTES, least, None
    )
    slots = (disk_bytes - geometry.SLACK_BYTES) // (segment + geometry.SLOT_OVERHEAD_BYTES)
    return slots * chunks_in_segment(segment, chunk_bytes, io_bytes) if slots >= least else 0


def chunks_in_segment(segment_bytes: int, chunk_bytes: int, io_bytes: int) -> int:
    """Chunks between the header and the footer of one segment."""
    page = segment_format.MIN_PAGE_BYTES
    payload = segment_format.round_up(chunk_bytes, page)
    per_extent = max(1, io_bytes // payload)
    room = segment_bytes - 2 * page

    def needed(count: int) -> int:
        whole, rest = divmod(count, per_extent)
        tables = whole * segment_format.table_bytes(per_extent, page)
        tables += segment_format.table_bytes(rest, page) if rest else 0
        return count * payload + tables + segment_format.table_bytes(count, page)

    count = max(0, room // payload)
    while count and needed(count) > room:
        count -= 1
    return count


def _size(blocks: KvBlocks, request: Request, count: int) -> PoolSize:
    return size_pool(
        request.cpu_bytes,
        blocks.worker_kv_bytes_per_block,
        request.parallel.world_size,
        count,
        request.alignment,
        replicated=blocks.replicated,
    )


def _try(blocks: KvBlocks, request: Request, count: int) -> Choice | None:
    """A row of the table of choices; None where not one chunk of that size fits."""
    try:
        return _choice(blocks, request, count, _size(blocks, request, count))
    except ValueError:
        return None


def _choice(blocks: KvBlocks, request: Request, count: int, pool: PoolSize) -> Choice:
    on_disk = chunks_on_disk(request.disk_bytes, pool.kv_bytes_per_chunk, request.io_bytes)
    return Choice(
        blocks_per_chunk=count,
        tokens_per_chunk=count * min(group.tokens_per_block for group in blocks.groups),
        kv_bytes_per_chunk=pool.kv_bytes_per_chunk,
        padding=pool.padding,
        cpu_chunks=pool.num_chunks,
        cpu_tokens=tokens_in(pool.num_chunks, blocks.groups, count),
        disk_chunks=on_disk,
        disk_tokens=tokens_in(on_disk, blocks.groups, count),
        index_bytes=on_disk * INDEX_BYTES_PER_CHUNK,
    )
