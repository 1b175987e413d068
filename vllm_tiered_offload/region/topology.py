# SPDX-License-Identifier: Apache-2.0
"""One region is one host: refuse engines that are more, before anything is allocated."""

from __future__ import annotations

from vllm_tiered_offload.region.settings import RegionError


def refuse_other_hosts(parallel: object | None) -> None:
    """Raise `RegionError` when the engine's workers cannot all be on this host.

    Remote Ray workers cannot be seen here: they show as missing ranks when the
    scheduler joins.

    Args:
        parallel: vLLM's parallel config, or None where it is not known.
    """
    workers = int(getattr(parallel, "world_size", 1))
    if workers < 2:
        return
    hosts = int(getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1)))
    if hosts > 1:
        raise RegionError(
            f"the {workers} workers of this engine run on {hosts} hosts (nnodes), but the CPU "
            "pool is memory of one: use tensor and pipeline parallelism within a host and "
            "data parallelism over hosts"
        )
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        raise RegionError(
            f"distributed_executor_backend 'external_launcher' gives each of the {workers} "
            "workers a scheduler of its own, but the CPU pool has one: use 'mp'"
        )
