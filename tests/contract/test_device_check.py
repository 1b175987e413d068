# SPDX-License-Identifier: Apache-2.0
"""The GPU check itself, rehearsed: on the CPU, and with vLLM's GPU code over played CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support import device_check, fake_cuda
from tests.support.engine import REPOSITORY


@pytest.mark.parametrize("shape", device_check.SHAPES.values(), ids=device_check.SHAPES.keys())
@pytest.mark.parametrize("factor", [1, 8])
def test_on_the_cpu(shape: device_check.Shape, factor: int) -> None:
    facts = device_check.check_transfer("cpu", shape, factor)
    assert not facts["pinned"]
    assert facts["chunks"] == device_check.CHUNKS


@pytest.mark.parametrize("shape", device_check.SHAPES.values(), ids=device_check.SHAPES.keys())
def test_through_vllms_gpu_worker(
    shape: device_check.Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = fake_cuda.play(monkeypatch)
    plain = device_check.kv_caches
    monkeypatch.setattr(device_check, "caches_on", lambda _, *a: fake_cuda.on_gpu(plain(*a)))
    assert device_check.check_transfer("cuda", shape, 2)["pinned"]
    assert pinned == {}


def test_wrong_bytes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_tiered_offload.worker import copy

    real = copy.run

    def one_byte_off(copies, store: bool) -> None:
        copies.host[0] += 1
        real(copies, store)

    monkeypatch.setattr(copy, "run", one_byte_off)
    with pytest.raises(AssertionError, match="stored bytes differ"):
        device_check.check_transfer("cpu", device_check.LAYERS, 2)


def test_rates_of_both_regions(no_leftovers_in_shm: None) -> None:
    sizes = {"layers": 2, "page": 4096, "blocks": 8}
    slot = sizes["layers"] * sizes["page"]
    for region in (device_check.open_region(8, slot), device_check.vllms_region(8, slot)):
        store, load, pinned = device_check.rates("cpu", region, **sizes, repeats=2)
        assert store > 0
        assert load > 0
        assert not pinned


def gpu_check(
    *arguments: str, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/gpu_check.sh", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_script_names_its_steps() -> None:
    done = gpu_check("--dry-run")
    assert done.returncode == 0, done.stderr
    steps = [line.split()[0] for line in done.stdout.splitlines()]
    assert steps == ["about", "memfd", "shm", "huge-pages", "timing", "restart"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_script_says_why_it_skips() -> None:
    done = gpu_check()
    assert (done.returncode, done.stdout) == (
        77,
        "gpu_check: skipped: torch sees no CUDA device\n",
    )
    done = gpu_check(python="/nowhere/python")
    assert done.returncode == 77
    assert "'/nowhere/python' is not on the PATH" in done.stdout
