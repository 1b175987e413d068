# SPDX-License-Identifier: Apache-2.0
"""The pool's arithmetic, against what must always hold and against worked examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.config import ConfigError
from vllm_tiered_offload.spec.sizing import PoolSize, round_up, size_pool

PAGE = 4096
EMPTY = PoolSize(0, 0, 0, 0, 0)
ODD = 3_098_112  # 756.375 pages

block_bytes = st.integers(1, 1 << 24) | st.just(ODD)
alignments = st.sampled_from([1, 2, 512, PAGE, 65536, 2 << 20])


@given(
    budget=st.integers(0, 1 << 42),
    block=block_bytes,
    world=st.integers(1, 64),
    blocks=st.integers(1, 64),
    alignment=alignments,
    replicated=st.booleans(),
)
def test_budget_alignment_and_padding(budget, block, world, blocks, alignment, replicated):
    payload = block * blocks * (1 if replicated else world)
    row = round_up(payload, alignment)
    if budget < row:
        with pytest.raises(ConfigError, match=rf"takes {row} bytes") as refused:
            size_pool(budget, block, world, blocks, alignment, replicated=replicated)
        assert "\n" not in str(refused.value)
        return
    pool = size_pool(budget, block, world, blocks, alignment, replicated=replicated)
    assert pool.num_chunks >= 1
    assert pool.total_bytes <= budget
    assert pool.total_bytes + pool.kv_bytes_per_chunk > budget
    assert pool.kv_bytes_per_chunk % alignment == 0
    assert 0 <= pool.padding < alignment
    assert pool.kv_bytes_per_chunk == payload + pool.padding
    assert pool.page_bytes_per_worker == block * blocks


@given(value=st.integers(0, 1 << 60), multiple=st.integers(1, 1 << 30))
def test_round_up_is_the_nearest_multiple_above(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


def test_an_odd_chunk_is_padded_to_a_page():
    pool = size_pool(1 << 30, ODD, 1, alignment=PAGE)
    assert pool.kv_bytes_per_chunk == 757 * PAGE == 3_100_672
    assert pool.padding == 2_560
    # One chunk fewer than the unpadded size promises.
    budget = 1_000 * ODD
    assert size_pool(budget, ODD, 1, alignment=1).num_chunks == 1_000
    assert size_pool(budget, ODD, 1, alignment=PAGE).num_chunks == 999


def test_padding_costs_chunks_and_never_budget():
    # 100 chunks of a page and a byte: padded they take two pages each.
    pool = size_pool(100 * (PAGE + 1), PAGE + 1, 1, alignment=PAGE)
    assert pool.num_chunks == 50


def test_the_workers_share_a_row():
    pool = size_pool(1 << 20, 9_000, 2, blocks_per_chunk=3, alignment=PAGE)
    assert pool.kv_bytes_per_block == 18_000
    assert pool.page_bytes_per_worker == 27_000
    assert pool.kv_bytes_per_chunk == 14 * PAGE
    assert pool.padding == 14 * PAGE - 54_000


def test_a_replicated_layout_holds_one_copy():
    one = size_pool(1 << 30, ODD, 1, alignment=PAGE)
    assert size_pool(1 << 30, ODD, 8, alignment=PAGE, replicated=True) == one


@pytest.mark.parametrize(("block", "world"), [(0, 1), (4096, 0), (0, 0), (-1, 2), (4096, -1)])
def test_no_blocks_or_no_workers_is_an_empty_pool(block, world):
    assert size_pool(1 << 30, block, world, alignment=PAGE) == EMPTY
    assert EMPTY.total_bytes == 0


def test_a_budget_below_one_chunk_says_how_large_one_is():
    with pytest.raises(ConfigError, match=r"\.cpu_bytes_to_use: 8191 .* takes 8192 bytes"):
        size_pool(8191, PAGE + 1, 1, alignment=PAGE)
    assert size_pool(8192, PAGE + 1, 1, alignment=PAGE).num_chunks == 1


@pytest.mark.parametrize(("blocks", "alignment"), [(0, 1), (-1, 1), (1, 0), (1, -4096)])
def test_impossible_arguments(blocks, alignment):
    with pytest.raises(ConfigError, match="is not 1 or more"):
        size_pool(1 << 30, 4096, 1, blocks, alignment)
