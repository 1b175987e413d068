# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_tiered_offload.store import faults


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    faults.arm("")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"
