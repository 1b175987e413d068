# SPDX-License-Identifier: Apache-2.0
"""How many chunks fit into the CPU pool, and how large each is. Pure arithmetic.

A chunk's row holds one slot per copy, then padding up to the alignment:

    | worker 0 | worker 1 | ... | worker n-1 | pad |

The row is padded first and the budget divided by the padded row, so that padding never
takes the pool over the budget. All sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_offload.config import ConfigError

_PREFIX = "kv_connector_extra_config."


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool. `kv_bytes_per_chunk` is the row as allocated, padding included.

    `page_bytes_per_worker` is one worker's slot in a row, never padded. An engine without
    KV blocks has an empty pool: all fields are 0.
    """

    num_chunks: int
    kv_bytes_per_block: int
    kv_bytes_per_chunk: int
    page_bytes_per_worker: int
    padding: int

    @property
    def total_bytes(self) -> int:
        """What the pool takes; at most the budget it was sized for."""
        return self.num_chunks * self.kv_bytes_per_chunk


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def size_pool(
    cpu_bytes_to_use: int,
    worker_kv_bytes_per_block: int,
    world_size: int,
    blocks_per_chunk: int = 1,
    alignment: int = 1,
    *,
    replicated: bool = False,
) -> PoolSize:
    """Size a pool of `cpu_bytes_to_use` for an engine of `world_size` workers.

    Args:
        worker_kv_bytes_per_block: KV of one GPU block in one worker, over its layers.
        alignment: every row is a multiple of this.
        replicated: all workers hold the same KV (MLA under tensor parallelism), so that a
            row holds it once.

    Raises:
        ConfigError: `blocks_per_chunk` or `alignment` is below 1, or the budget is below
            one chunk.
    """
    for name, value in (
        ("blocks_per_chunk", blocks_per_chunk),
        ("block_size_alignment", alignment),
    ):
        if value < 1:
            raise ConfigError(_PREFIX + name, f"{value} is not 1 or more")
    if worker_kv_bytes_per_block <= 0 or world_size <= 0:
        return PoolSize(0, 0, 0, 0, 0)
    copies = 1 if replicated else world_size
    per_block = worker_kv_bytes_per_block * copies
    unpadded = per_block * blocks_per_chunk
    row = round_up(unpadded, alignment)
    if cpu_bytes_to_use < row:
        raise ConfigError(
            f"{_PREFIX}cpu_bytes_to_use",
            _too_small(cpu_bytes_to_use, row, unpadded, blocks_per_chunk, copies),
        )
    return PoolSize(
        num_chunks=cpu_bytes_to_use // row,
        kv_bytes_per_block=per_block,
        kv_bytes_per_chunk=row,
        page_bytes_per_worker=unpadded // copies,
        padding=row - unpadded,
    )


def _too_small(budget: int, row: int, unpadded: int, blocks: int, copies: int) -> str:
    return (
        f"{budget} is below one chunk, which takes {row} bytes "
        f"({blocks} block(s) of {unpadded // blocks} bytes over {copies} worker slot(s), "
        f"{row - unpadded} padding); give at least that, better some hundred chunks"
    )
