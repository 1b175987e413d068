# SPDX-License-Identifier: Apache-2.0
"""Rows of the pool for one request's promotions, taken in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    PendingPromotion,
)

# tier index -> request id -> what will be one load job
Pending = dict[int, dict[str, PendingPromotion]]


def free_chunks(pool: CPUPrimaryTierOffloadingManager) -> int:
    """Rows that are free or could be evicted now."""
    return int(pool._get_num_free_chunks() + pool._num_evictable_cache_chunks)


def ready(
    pool: CPUPrimaryTierOffloadingManager, context: ReqContext, keys: Sequence[OffloadKey]
) -> list[OffloadKey]:
    """Those of `keys` that can be read from the pool."""
    return [key for key in keys if pool.lookup(key, context) is LookupResult.HIT]


def reserve(
    pool: CPUPrimaryTierOffloadingManager, context: ReqContext, keys: Sequence[OffloadKey]
) -> dict[OffloadKey, int]:
    """Rows for as many of the first `keys` as the pool gives, by key.

    Keys that are in the pool by now get none. vLLM's pool refuses a call as a
    whole; its policy may protect chunks that count as evictable, so a refused
    call is tried again with half of the keys.
    """
    while keys:
        taken = pool.prepare_write(keys, context)
        if taken is not None:
            rows = taken.store_spec.chunk_ids.tolist()
            return dict(zip(taken.keys_to_store, rows, strict=True))
        keys = keys[: len(keys) // 2]
    return {}


def enlist(
    pending: Pending,
    context: ReqContext,
    rows: Mapping[OffloadKey, int],
    tiers: Mapping[OffloadKey, int],
) -> None:
    """Add reserved rows to the loads that vLLM submits, one a tier and request."""
    for key, row in rows.items():
        of_tier = pending.setdefault(tiers[key], {})
        load = of_tier.get(context.req_id)
        if load is None:
            load = of_tier[context.req_id] = PendingPromotion(req_context=context)
        load.keys.append(key)
        load.chunk_ids.append(row)


def group_count(tiers: Sequence[Any] | None) -> int:
    """KV groups of the model, as the tiers' spec knows them; 1 if none does."""
    for tier in tiers or ():
        config = getattr(getattr(tier, "_offloading_spec", None), "config", None)
        groups = getattr(config, "groups", None)
        if groups:
            return len(groups)
    return 1
