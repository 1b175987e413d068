# SPDX-License-Identifier: Apache-2.0
"""How many threads write: as asked, else as the root is large enough for."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import KIB, MIB, Engine

from vllm_tiered_offload.store import geometry
from vllm_tiered_offload.store.api import StoreError, StoreSettings


@pytest.mark.parametrize(
    ("asked", "slots", "writers"),
    [(None, 3, 1), (None, 127, 1), (None, 128, 2), (None, 999_999, 2), (1, 5000, 1), (3, 7, 3)],
)
def test_writers(asked: int | None, slots: int, writers: int) -> None:
    settings = StoreSettings((Path("/"),), write_threads=asked)
    assert geometry.writers_of(settings, slots) == writers


def test_a_root_has_as_many_writers_as_it_is_large_enough_for(root: Path) -> None:
    size = 256 * KIB + geometry.SLOT_OVERHEAD_BYTES
    for slots, writers in ((128, 2), (127, 1)):
        bound = geometry.SLACK_BYTES + slots * size + 64 * KIB
        with Engine(root, max_bytes=bound, segment_bytes=256 * KIB) as engine:
            (facts,) = engine.store.describe()["roots"]
            assert (facts["slots"], facts["writers"]) == (slots, writers)


def test_a_root_too_small_for_the_writers_asked_for_is_refused(root: Path) -> None:
    with pytest.raises(StoreError, match="7 are needed"):
        Engine(root, max_bytes=4 * MIB, segment_bytes=512 * KIB, write_threads=3)
