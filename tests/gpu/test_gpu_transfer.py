# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker over our region on a real device; skipped without one."""

from __future__ import annotations

import pytest

from tests.support import device_check
from vllm_tiered_offload.region.shared_region import RegionSettings

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", device_check.SHAPES.values(), ids=device_check.SHAPES.keys())
@pytest.mark.parametrize("factor", [1, 2, 8])
def test_every_byte_arrives_in_both_directions(
    shape: device_check.Shape, factor: int, no_leftovers_in_shm: None
) -> None:
    assert device_check.check_transfer("cuda", shape, factor)["pinned"]


@pytest.mark.parametrize("huge_pages", ["auto", "off"])
def test_a_memfd_can_be_pinned(huge_pages: str) -> None:
    settings = RegionSettings(backing="memfd", huge_pages=huge_pages)
    assert device_check.check_transfer("cuda", device_check.LAYERS, 2, settings)["pinned"]


def test_a_file_in_shm_can_be_pinned(no_leftovers_in_shm: None) -> None:
    settings = RegionSettings(backing="shm")
    assert device_check.check_transfer("cuda", device_check.LAYERS, 2, settings)["pinned"]
