# SPDX-License-Identifier: Apache-2.0
"""Offsets are arithmetic: also for regions no test machine could hold."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.region.layout import Layout, round_up
from vllm_tiered_offload.region.prefault import plan
from vllm_tiered_offload.region.settings import RegionError

PAGE = mmap.PAGESIZE
GIB = 1 << 30


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout and the number of its workers."""
    workers = draw(st.integers(1, 9))
    slot = draw(st.integers(1, 5 * PAGE))
    padding = draw(st.integers(0, 2))
    row = round_up(slot * workers, PAGE) + padding * PAGE
    return Layout(draw(st.integers(1, 40)), row, slot), workers


@given(layouts())
def test_slot_ranges_are_whole_pages_around_the_slot(made: tuple[Layout, int]) -> None:
    layout, workers = made
    for slot in range(workers):
        ranges = list(layout.slot_ranges(slot))
        assert len(ranges) == layout.num_chunks
        for row, (start, length) in enumerate(ranges):
            first = row * layout.row_bytes + slot * layout.slot_bytes
            assert start % PAGE == length % PAGE == 0
            assert start <= first < start + PAGE
            assert first + layout.slot_bytes <= start + length
            assert start + length - (first + layout.slot_bytes) < PAGE
            assert start + length <= (row + 1) * layout.row_bytes


@given(layouts(), st.sampled_from([PAGE, 4 * PAGE, 2 << 20]), st.booleans())
def test_the_workers_shares_cover_every_used_page(
    made: tuple[Layout, int], granule: int, by_slot: bool
) -> None:
    layout, workers = made
    mapped = round_up(layout.total_bytes, PAGE)
    taken: set[int] = set()
    for index in range(workers):
        slot = index if by_slot else None
        ranges = plan(layout, mapped, granule, index=index, count=workers, slot=slot)
        for start, length in ranges:
            assert start + length <= mapped
            pages = set(range(start, start + length, PAGE))
            assert by_slot or not pages & taken  # equal shares are disjoint
            taken |= pages
    used = {
        (row * layout.row_bytes + byte) // PAGE * PAGE
        for row in range(layout.num_chunks)
        for byte in range(0, workers * layout.slot_bytes, 512)
    }
    assert used <= taken


def test_600_gib_in_pure_arithmetic() -> None:
    """vLLM's registration cuts at 64 GiB: the cuts are on row boundaries, none overflows."""
    slot = 3_098_112
    layout = Layout(600 * GIB // round_up(8 * slot, PAGE), round_up(8 * slot, PAGE), slot)
    assert 599 * GIB < layout.total_bytes <= 600 * GIB
    rows = 64 * GIB // layout.row_bytes
    cuts = range(0, layout.total_bytes, rows * layout.row_bytes)
    assert len(cuts) == 10
    assert all(cut % layout.row_bytes == 0 and cut % PAGE == 0 for cut in cuts)
    *_, last = layout.slot_ranges(7)
    assert last[0] + last[1] <= layout.total_bytes
    shares = [
        next(iter(plan(layout, layout.total_bytes, 2 << 20, index=i, count=8, slot=None)))
        for i in range(8)
    ]
    assert sum(length for _, length in shares) == layout.total_bytes


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((0, PAGE, PAGE), "empty region.*cpu_bytes_to_use"),
        ((1, PAGE + 1, 1), "not a multiple of the page size.*block_size_alignment"),
        ((1, PAGE, PAGE + 1), "do not fit"),
        ((1, PAGE, 0), "do not fit"),
    ],
)
def test_impossible_sizes(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(RegionError, match=named):
        Layout(*sizes)
