# SPDX-License-Identifier: Apache-2.0
"""The host worker moves exactly the bytes that vLLM's specs name, and no others."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.support.transfer import (
    PlainRegion,
    Shape,
    Transfer,
    chunks_needed,
    expected_load,
    expected_store,
    kv_caches,
    random_transfer,
)
from vllm_tiered_offload.worker import copy
from vllm_tiered_offload.worker.host import HostOffloadingWorker

BLOCKS = 40
CHUNKS = 36


def check_both_ways(shape: Shape, transfer: Transfer, factor: int, rank: int = 1) -> None:
    """Store, compare the whole pool; load into another cache, compare all of that."""
    slot = shape.block_bytes * factor
    region = PlainRegion(CHUNKS, row=3 * slot + 13, slot=slot, rank=rank)
    before = region.bytes.clone()
    caches, chunks = kv_caches(shape, BLOCKS), CPULoadStoreSpec(list(transfer.chunks))
    worker = HostOffloadingWorker(caches, factor, CHUNKS, region)
    own = slice(rank * slot, (rank + 1) * slot)
    pool = expected_store(shape, caches, before[:, own], transfer, factor)
    assert worker.submit_store(1, transfer.spec, chunks)
    worker.wait({1})
    before[:, own] = pool
    assert torch.equal(region.bytes, before)

    for cache in caches.tensors:
        cache.tensor.random_(-128, 128)
    after = expected_load(shape, caches, pool, transfer, factor)
    assert worker.submit_load(2, chunks, transfer.spec)
    worker.wait({2})
    assert all(torch.equal(t.tensor, a) for t, a in zip(caches.tensors, after, strict=True))
    assert torch.equal(region.bytes, before)
    moved = sum(
        len(b) * sum(size for _, size in g)
        for b, g in zip(transfer.blocks, shape.groups, strict=True)
    )
    results = worker.get_finished()
    assert [(r.job_id, r.success, r.transfer_size) for r in results] == [
        (1, True, moved),
        (2, True, moved),
    ]
    assert all(r.transfer_time is not None and r.transfer_time > 0 for r in results)
    worker.shutdown()


ONE_LAYER = Shape(pages=(96,), groups=(((0, 96),),))
LAYERS = Shape(pages=(96, 96, 40), groups=(((0, 96), (1, 96), (2, 40)),))
PADDED = Shape(pages=(96, 64), groups=(((0, 80), (1, 64)),))
SHARED = Shape(pages=(96, 96), groups=(((0, 96), (1, 96)), ((0, 64), (1, 72))))
STRIDED = Shape(pages=(96, 64), groups=(((0, 96), (1, 60)),), gap=24)
SHAPES = {
    "one layer": ONE_LAYER,
    "layers": LAYERS,
    "padded": PADDED,
    "groups share tensors": SHARED,
    "strided rows": STRIDED,
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("factor", [1, 2, 8])
@pytest.mark.parametrize(
    ("count", "first"),
    [(1, 0), (8, 0), (16, 8), (3, 7), (11, 5), (2, 30)],
    ids=["one", "chunk", "chunks", "partial first", "partial both", "late"],
)
def test_blocks_land_where_they_belong(
    shape: Shape, factor: int, count: int, first: int
) -> None:
    groups = len(shape.groups)
    transfer = random_transfer(
        np.random.default_rng(count * first + factor),
        [count] * groups,
        [first + g for g in range(groups)],
        factor,
        blocks=BLOCKS,
        chunks=CHUNKS,
    )
    check_both_ways(shape, transfer, factor)


def test_a_group_without_blocks_is_left_alone() -> None:
    check_both_ways(SHARED, Transfer(((), (3, 4, 9)), (5, 3), (2, 8)), 2)
    check_both_ways(SHARED, Transfer(((3, 4, 9), ()), (3, 0), (8, 1)), 2)
    check_both_ways(SHARED, Transfer(((), ()), (0, 0), ()), 2)


def test_consecutive_blocks_and_chunks() -> None:
    """Neighbours on both sides become one copy; it must end where they do."""
    check_both_ways(LAYERS, Transfer((tuple(range(4, 20)),), (0,), (6, 7)), 8)
    check_both_ways(LAYERS, Transfer((tuple(range(19, 3, -1)),), (0,), (6, 7)), 8)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Transfer, int]:
    factor = draw(st.sampled_from([1, 2, 3, 8]))
    pages = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    layer = st.integers(0, len(pages) - 1).flatmap(
        lambda t: st.tuples(st.just(t), st.integers(1, pages[t]))
    )
    groups = draw(st.lists(st.lists(layer, min_size=0, max_size=3), min_size=1, max_size=3))
    counts = draw(st.lists(st.integers(0, 10), min_size=len(groups), max_size=len(groups)))
    firsts = draw(st.lists(st.integers(0, 50), min_size=len(groups), max_size=len(groups)))
    ids = draw(st.permutations(range(BLOCKS)))
    starts = np.cumsum([0, *counts])
    blocks = tuple(tuple(ids[s : s + c]) for s, c in zip(starts, counts, strict=False))
    need = sum(chunks_needed(c, f, factor) for c, f in zip(counts, firsts, strict=True))
    chunks = tuple(draw(st.permutations(range(CHUNKS)))[:need])
    shape = Shape(tuple(pages), tuple(map(tuple, groups)), draw(st.integers(0, 5)))
    return shape, Transfer(blocks, tuple(firsts), chunks), factor


@settings(deadline=None, max_examples=60)
@given(cases())
def test_any_transfer_is_exact(case: tuple[Shape, Transfer, int]) -> None:
    shape, transfer, factor = case
    check_both_ways(shape, transfer, factor)


@pytest.mark.parametrize("allowed", [True, False], ids=["vectors", "no vectors"])
def test_when_the_engine_holds_the_gil(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    """Held up at once, and with process_vm_readv forbidden as sandboxes may do."""
    monkeypatch.setattr(copy, "PATIENCE", -1.0)
    monkeypatch.setattr(copy, "vector_copy_works", lambda: allowed)
    transfer = Transfer(((3, 9, 2), (5, 4)), (1, 3), (2, 8, 0, 1))
    check_both_ways(SHARED, transfer, 2)


def test_held_up_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pages one by one, the rest by vectors, none of them twice or never."""
    times = itertools.count()
    monkeypatch.setattr(copy, "time", SimpleNamespace(perf_counter=lambda: float(next(times))))
    monkeypatch.setattr(copy, "PATIENCE", 7.0)
    vectors = mock.Mock(side_effect=copy._copy_vectors)
    monkeypatch.setattr(copy, "_copy_vectors", vectors)
    transfer = random_transfer(
        np.random.default_rng(1), [20], [0], 1, blocks=BLOCKS, chunks=CHUNKS
    )
    check_both_ways(ONE_LAYER, transfer, 1)
    assert [0 < len(call.args[2]) < 20 for call in vectors.call_args_list] == [True, True]


@pytest.mark.parametrize("call_bytes", [1 << 30, 200, 90])
def test_pieces_of_every_size(monkeypatch: pytest.MonkeyPatch, call_bytes: int) -> None:
    """More pieces, or bytes, than one call takes, and a piece larger than that."""
    monkeypatch.setattr(copy, "IOV_MAX", 3)
    monkeypatch.setattr(copy, "PATIENCE", -1.0)
    monkeypatch.setattr(copy, "CALL_BYTES", call_bytes)
    rng = np.random.default_rng(1)
    for factor in (1, 8):
        transfer = random_transfer(rng, [20], [3], factor, blocks=BLOCKS, chunks=CHUNKS)
        check_both_ways(LAYERS, transfer, factor)


def test_a_pool_of_plain_tensors() -> None:
    """Without a region the pool is this process's own."""
    caches = kv_caches(SHARED, BLOCKS)
    worker = HostOffloadingWorker(caches, 2, CHUNKS, None)
    transfer = Transfer(((3, 9, 2), (5, 4)), (1, 3), (2, 8, 0, 1))
    chunks = CPULoadStoreSpec(list(transfer.chunks))
    stored = [t.tensor.clone() for t in caches.tensors]
    worker.submit_store(1, transfer.spec, chunks)
    worker.wait({1})
    for cache in caches.tensors:
        cache.tensor.zero_()
    worker.submit_load(2, chunks, transfer.spec)
    worker.wait({2})
    for block in (3, 9, 2):
        assert torch.equal(caches.tensors[1].tensor[block], stored[1][block])
    assert torch.equal(caches.tensors[1].tensor[4, :72], stored[1][4, :72])
    assert not caches.tensors[1].tensor[4, 72:].any()
    worker.shutdown()


def test_tensors_of_other_types_and_shapes() -> None:
    """vLLM may hand over (blocks, ...) of the cache's own type."""
    tensor = torch.randn(6, 2, 8, dtype=torch.bfloat16)
    caches = kv_caches(ONE_LAYER, 1)
    caches.tensors[0].tensor, caches.tensors[0].page_size_bytes = tensor, 32
    caches.group_data_refs[0][0] = CanonicalKVCacheRef(0, 32)
    worker = HostOffloadingWorker(caches, 1, 4, None)
    spec, chunks = Transfer(((5, 0),), (0,), (3, 1)).spec, CPULoadStoreSpec([3, 1])
    before = tensor.clone()
    worker.submit_store(1, spec, chunks)
    worker.wait({1})
    tensor.zero_()
    worker.submit_load(2, chunks, spec)
    worker.wait({2})
    assert torch.equal(tensor[[5, 0]], before[[5, 0]])
    assert not tensor[1:5].any()
    worker.shutdown()


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (Transfer(((1, 2),), (0,), (0, 1)), "1 of 2 chunks"),
        (Transfer(((1, 2, 3),), (1,), (0,)), "3 blocks need 2 chunks, got 1"),
        (Transfer(((1, BLOCKS),), (0,), (0,)), f"block {BLOCKS} is not one of 0 to 39"),
        (Transfer(((1, -1),), (0,), (0,)), "block -1 is not"),
        (Transfer(((1, 2),), (0,), (CHUNKS,)), f"chunk {CHUNKS} is not one of 0 to 35"),
        (Transfer(((1,), (2,)), (0, 0), (0, 1)), "has 2 KV groups, the cache has 1"),
    ],
)
def test_specs_that_do_not_fit_are_refused(transfer: Transfer, message: str) -> None:
    """Refused before memory is touched: a copy past a row's end corrupts another's KV."""
    worker = HostOffloadingWorker(kv_caches(ONE_LAYER, BLOCKS), 2, CHUNKS, None)
    with pytest.raises(ValueError, match=message):
        worker.submit_store(1, transfer.spec, CPULoadStoreSpec(list(transfer.chunks)))
    assert worker.get_finished() == []
    worker.wait({1})
    worker.shutdown()


def _on_meta(caches: CanonicalKVCaches) -> None:
    caches.tensors[0].tensor = torch.empty(4, 96, dtype=torch.int8, device="meta")


def _byte_stride(caches: CanonicalKVCaches) -> None:
    caches.tensors[0].tensor = torch.empty(4, 192, dtype=torch.int8)[:, ::2]


def _page_too_large(caches: CanonicalKVCaches) -> None:
    caches.group_data_refs[0][0] = CanonicalKVCacheRef(0, 97)


@pytest.mark.parametrize("spoil", [_on_meta, _byte_stride, _page_too_large])
def test_a_failed_constructor_leaves_the_region_to_its_owner(spoil) -> None:
    caches, region = kv_caches(ONE_LAYER, BLOCKS), PlainRegion(CHUNKS, 96, 96)
    spoil(caches)
    with pytest.raises(ValueError, match=r"KV cache|page of 97 bytes"):
        HostOffloadingWorker(caches, 1, CHUNKS, region)
    assert region.cleanups == 0
