# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests, and the markers that need a machine to fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "root" in item.keywords and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if "gpu" in item.keywords and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """Where made models are kept between runs (`VTO_CACHE`, default `.cache`)."""
    default = Path(__file__).resolve().parents[1] / ".cache"
    return Path(os.environ.get("VTO_CACHE", default)) / "models"


@pytest.fixture(scope="session")
def tiny_llama(model_cache: Path) -> Path:
    """A 4-layer Llama with random weights."""
    from tests.support.tiny_model import make_llama

    return make_llama(model_cache / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_gemma3(model_cache: Path) -> Path:
    """A 4-layer Gemma 3: sliding-window and full attention, two KV groups."""
    from tests.support.tiny_model import make_gemma3

    return make_gemma3(model_cache / "tiny-gemma3")


@pytest.fixture
def no_leftovers_in_shm() -> Iterator[None]:
    """Fail if the test leaves a file of ours in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    yield
    left = {n for n in set(os.listdir("/dev/shm")) - before if "tiered" in n or "offload" in n}
    assert not left, f"left in /dev/shm: {sorted(left)}"
