# SPDX-License-Identifier: Apache-2.0
"""The canonical layout: all ranks' bytes in one page, the same whatever the parallelism.

The oracle is vLLM's own GPU worker, its CUDA calls played on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from tests.support import fake_cuda
from tests.support.transfer import PlainRegion
from vllm_tiered_offload.worker.host import HostOffloadingWorker

RANKS, TOKENS, HEADS, HEAD = 2, 4, 4, 6
BLOCKS, CHUNKS = 20, 12
LOCAL = TOKENS * HEADS // RANKS * HEAD
CANONICAL = LOCAL * RANKS
LATENT = 40  # held in full by every rank, as with MLA
ROW = 8 * (CANONICAL + LATENT) + 11


def split_by_heads(rank: int) -> CanonicalPageMapping:
    """Every token's own heads, side by side with the other ranks'."""
    own = HEADS // RANKS * HEAD
    run = CopyRun(0, rank * own, own, TOKENS, own, own * RANKS)
    return CanonicalPageMapping(CANONICAL, LOCAL, (run,), 1, 0, True)


def taking_turns(rank: int) -> CanonicalPageMapping:
    """The same bytes in all ranks: one of them writes a page, in two runs."""
    runs = (CopyRun(0, 16, 24, 1, 0, 0), CopyRun(24, 0, 16, 1, 0, 0))
    return CanonicalPageMapping(LATENT, LATENT, runs, RANKS, rank, True)


def rank_caches(rank: int, seed: int = 0) -> CanonicalKVCaches:
    latent = torch.Generator().manual_seed(seed)
    heads = torch.Generator().manual_seed(seed + 1 + rank)
    tensors = [
        torch.randint(-128, 128, (BLOCKS, LOCAL), dtype=torch.int8, generator=heads),
        torch.randint(-128, 128, (BLOCKS, LATENT), dtype=torch.int8, generator=latent),
    ]
    refs = [
        [CanonicalKVCacheRef(0, LOCAL, split_by_heads(rank))],
        [CanonicalKVCacheRef(1, LATENT, taking_turns(rank))],
    ]
    return CanonicalKVCaches([CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors], refs)


def region_over(memory: torch.Tensor) -> PlainRegion:
    region = PlainRegion(CHUNKS, ROW, 0)
    region.bytes = memory
    return region


Make = Callable[[CanonicalKVCaches, int, PlainRegion], object]


def ours(caches: CanonicalKVCaches, factor: int, region: PlainRegion) -> HostOffloadingWorker:
    return HostOffloadingWorker(caches, factor, CHUNKS, region, canonical_layout=True)


def vllms(caches: CanonicalKVCaches, factor: int, region: PlainRegion) -> CPUOffloadingWorker:
    region.is_pinned, region.rank, region._row_stride = False, 0, ROW
    region._base, region.total_size_bytes, region.pinned_addresses = region.bytes, 0, []
    region.cpu_page_size = region.page_size = ROW
    return CPUOffloadingWorker(
        fake_cuda.on_gpu(caches), factor, CHUNKS, region, canonical_layout=True
    )


SPEC = GPULoadStoreSpec([3, 9, 2, 7, 5, 4, 11, 1, 0], [5, 4], [3, 6])


def host_chunks(factor: int) -> CPULoadStoreSpec:
    need = {1: 9, 2: 3 + 2, 8: 1 + 2}[factor]
    return CPULoadStoreSpec([7, 2, 11, 5, 0, 9, 4, 1, 8][:need])


def round_trip(make: Make, factor: int) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """All ranks store into one pool and load what others stored: pool and caches after."""
    memory = torch.full((CHUNKS, ROW), 99, dtype=torch.int8)
    for rank in range(RANKS):
        worker = make(rank_caches(rank), factor, region_over(memory))
        worker.submit_store(1, SPEC, host_chunks(factor))
        worker.wait({1})
        stored = worker.get_finished()[0].transfer_size
        assert 0 < stored < 5 * LOCAL + 4 * LATENT
        worker.shutdown()
    loaded = []
    for rank in range(RANKS):
        caches = rank_caches(rank, seed=77)
        worker = make(caches, factor, region_over(memory))
        worker.submit_load(1, host_chunks(factor), SPEC)
        worker.wait({1})
        loaded.append([t.tensor.clone().as_subclass(torch.Tensor) for t in caches.tensors])
        worker.shutdown()
    return memory, loaded


@pytest.mark.parametrize("factor", [1, 2, 8])
def test_same_bytes_as_vllms_worker(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, loaded = round_trip(ours, factor)
    fake_cuda.play(monkeypatch)
    their_memory, their_loaded = round_trip(vllms, factor)
    assert torch.equal(memory, their_memory)
    for mine, theirs in zip(loaded, their_loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    # Every rank has its own heads and the shared latent again.
    for rank, (heads, latent) in enumerate(loaded):
        before = rank_caches(rank).tensors
        assert torch.equal(heads[[3, 9, 2, 7, 5]], before[0].tensor[[3, 9, 2, 7, 5]])
        assert torch.equal(latent[[4, 11, 1, 0]], before[1].tensor[[4, 11, 1, 0]])


def test_a_layer_without_mapping_is_refused() -> None:
    """Direct bytes under a canonical identity would be read as something else."""
    caches = rank_caches(0)
    caches.group_data_refs[1][0] = CanonicalKVCacheRef(1, LATENT)
    region = region_over(torch.zeros(CHUNKS, ROW, dtype=torch.int8))
    with pytest.raises(ValueError, match="no canonical mapping"):
        ours(caches, 1, region)
    assert region.cleanups == 0


def test_plain_tensors_cannot_hold_the_canonical_layout() -> None:
    """A private pool holds this rank's bytes alone."""
    with pytest.raises(ValueError, match="canonical_layout needs the shared region"):
        HostOffloadingWorker(rank_caches(0), 1, CHUNKS, None, canonical_layout=True)
