# SPDX-License-Identifier: Apache-2.0
"""What vLLM's GPU worker does with the region, in every supported version's own words.

The pinning and view code is taken from vLLM's source, of the installed version
and of those found under `VTO_VLLM_SOURCES` (folders named by version, each
with `vllm/` inside); only the CUDA calls and the copy engine are replaced.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import logging
import mmap
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from vllm_tiered_offload.region import preflight
from vllm_tiered_offload.region.shared_region import RegionSettings, SharedOffloadRegion

PAGE = mmap.PAGESIZE
GIB = 1 << 30
SUPPORTED = ["0.30.0", "0.31.0", "0.32.0", "0.33.0"]


def source_of(version: str) -> Path:
    """vLLM's package folder in that version."""
    if vllm.__version__.startswith(version):
        return Path(vllm.__file__).parent
    folder = os.environ.get("VTO_VLLM_SOURCES")
    if not folder:
        pytest.skip(f"vLLM {version} is not installed and VTO_VLLM_SOURCES is not set")
    found = Path(folder) / version / "vllm"
    if not found.is_dir():
        pytest.skip(f"no source of vLLM {version} in VTO_VLLM_SOURCES")
    return found


class Cuda:
    """Host registration as CUDA keeps it: whole pages, no overlaps, all undone in the end."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.fail_at = 0

    def cudaHostRegister(self, address: int, size: int, flags: int = 0) -> int:
        self.calls += 1
        assert size > 0
        for start, length in self.registered.items():
            assert address + size <= start or start + length <= address
        if self.calls == self.fail_at:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 1

    def cudaGetLastError(self) -> int:
        return 0


class Code(int):
    """A CUDA error as torch wraps it: a number with a `value`."""

    @property
    def value(self) -> int:
        return int(self)


def names_of(version: str, cuda: Cuda) -> dict[str, Any]:
    """Everything the extracted code finds in its module, with CUDA and copying replaced."""
    codes = SimpleNamespace(cudaHostRegister=lambda *a: Code(cuda.cudaHostRegister(*a)))
    return {
        "Iterator": Iterator,
        "CudaRTLibrary": lambda: cuda,
        "PIN_MEMORY": True,
        "current_platform": SimpleNamespace(is_cuda_alike=lambda: True, device_name="cuda"),
        "host_register": lambda p, n: cuda.cudaHostRegister(p, n) == 0,
        "host_unregister": cuda.cudaHostUnregister,
        "logger": logging.getLogger("test"),
        "torch": SimpleNamespace(
            cuda=SimpleNamespace(cudart=lambda: codes), int8=torch.int8, Tensor=torch.Tensor
        ),
        "functools": functools,
        "time": time,
        "OffloadingWorker": object,
        "SingleDirectionOffloadingHandler": Handler,
        "_canonical_block_sizes": lambda refs, count: [3000, 5000],
    }


class Handler:
    """Stands where vLLM's copy engine is: keeps the tensors it is given."""

    def __init__(self, **given: Any) -> None:
        self.given = given


WANTED = {
    "MAX_HOST_REGISTER_CHUNK_BYTES",
    "MIN_HOST_REGISTER_SAVED_BYTES",
    "pin_mmap_region",
    "CPUOffloadingWorker",
}


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", "")


def vllms_code(version: str, cuda: Cuda) -> SimpleNamespace:
    file = source_of(version) / "v1/kv_offload/cpu/gpu_worker.py"
    future = ast.parse("from __future__ import annotations").body
    chosen = [n for n in ast.parse(file.read_text()).body if _name(n) in WANTED]
    module = names_of(version, cuda)
    code = ast.Module(body=future + chosen, type_ignores=[])
    exec(compile(code, str(file), "exec"), module)
    return SimpleNamespace(**{name: module[name] for name in WANTED & set(module)})


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    # The region undoes the registration by the installed vLLM's counterpart.
    with contextlib.suppress(ImportError):
        from vllm.v1.kv_offload.cpu import host_register

        monkeypatch.setattr(host_register, "host_unregister", cuda.cudaHostUnregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    return cuda


@contextlib.contextmanager
def region(chunks: int, row: int, slot: int, rank: int = 0) -> Iterator[SharedOffloadRegion]:
    made = SharedOffloadRegion(
        f"gpu-{uuid.uuid4()}", chunks, rank, row, slot,
        world_size=rank + 1, scheduler_joins=False,
        settings=RegionSettings(prefault=False, join_timeout=0.01),
    )  # fmt: skip
    yield made
    made.cleanup()


def test_the_region_has_everything_vllm_touches() -> None:
    """Every attribute that any version's code reads off a region."""
    seen: set[str] = set()
    for version in SUPPORTED:
        with contextlib.suppress(pytest.skip.Exception):
            for file in (source_of(version) / "v1/kv_offload").rglob("*.py"):
                if file.name != "shared_offload_region.py":
                    pattern = r"\b(?:_?mmap_region|region|(?:scheduler|worker)_mmap)\.([a-z_]+)"
                    seen |= set(re.findall(pattern, file.read_text()))
    assert {"_base", "rank", "cleanup", "create_next_worker_view"} <= seen
    with region(2, PAGE, PAGE) as made:
        assert [name for name in seen if not hasattr(made, name)] == []
        assert made._base is not None
        assert made._base.dtype == torch.int8
        assert made._base.shape == (made.total_size_bytes,)
        assert made.base_tensor is made._base
        assert SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT == PAGE


@pytest.mark.parametrize("version", SUPPORTED)
def test_pinning_covers_the_region_and_is_undone(version: str, cuda: Cuda) -> None:
    code = vllms_code(version, cuda)
    with region(10, 8 * PAGE, PAGE) as made:
        code.pin_mmap_region(made)
        assert made.is_pinned
        base = made._base.data_ptr()
        assert base % PAGE == 0
        assert sorted(cuda.registered.items()) == [(base, 80 * PAGE)]
    assert cuda.registered == {}
    assert not made.is_pinned


@pytest.mark.parametrize("version", SUPPORTED)
def test_600_gib_are_registered_in_rows(version: str, cuda: Cuda, monkeypatch: Any) -> None:
    """A sparse region of that size: every address is real, no page is ever taken."""
    monkeypatch.setattr(preflight, "check", lambda *_: None)
    code = vllms_code(version, cuda)
    slot = 3_098_112
    row = -(-8 * slot // PAGE) * PAGE
    chunks = 600 * GIB // row
    with region(chunks, row, slot, rank=7) as made:
        base = made._base.data_ptr()
        code.pin_mmap_region(made)
        assert made.is_pinned
        pieces = sorted((address - base, size) for address, size in cuda.registered.items())
        assert sum(size for _, size in pieces) == made.total_size_bytes
        assert all(start % row == 0 and size % row == 0 for start, size in pieces)
        if hasattr(code, "MAX_HOST_REGISTER_CHUNK_BYTES"):
            assert len(pieces) == 10
            assert all(size <= code.MAX_HOST_REGISTER_CHUNK_BYTES for _, size in pieces)
        view = made.create_next_worker_view(slot)
        last = view[-1]
        assert last.data_ptr() - base == (chunks - 1) * row + 7 * slot
        last[-1] = 77
        assert made.create_kv_memoryview()[chunks - 1, 8 * slot - 1] == 77
        del view, last
    assert cuda.registered == {}


@pytest.mark.parametrize("version", ["0.33.0"])
def test_only_the_workers_slots_are_registered(version: str, cuda: Cuda) -> None:
    code = vllms_code(version, cuda)
    slot = (1 << 20) + 300
    row = -(-8 * slot // PAGE) * PAGE
    with region(5, row, slot, rank=3) as made:
        code.pin_mmap_region(made, worker_slot_only=True)
        base = made._base.data_ptr()
        assert len(cuda.registered) == 5
        for chunk, (address, size) in enumerate(sorted(cuda.registered.items())):
            first = base + chunk * row + 3 * slot
            assert address % PAGE == size % PAGE == 0
            assert address <= first
            assert first + slot <= address + size
            assert size <= slot + 2 * PAGE
    assert cuda.registered == {}


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("fail_at", [1, 3])
def test_a_registration_that_fails_in_the_middle_is_rolled_back(
    version: str, fail_at: int, cuda: Cuda
) -> None:
    code = vllms_code(version, cuda)
    cuda.fail_at = fail_at
    with region(10, 8 * PAGE, PAGE) as made:
        if hasattr(code, "MAX_HOST_REGISTER_CHUNK_BYTES"):
            # Smaller pieces than vLLM's 64 GiB, through its own module constant.
            code.pin_mmap_region.__globals__["MAX_HOST_REGISTER_CHUNK_BYTES"] = 24 * PAGE
        elif fail_at > 1:
            pytest.skip("this version registers the region as a whole")
        code.pin_mmap_region(made)
        assert cuda.calls == fail_at
        assert not made.is_pinned
        assert made.pinned_addresses == []
        assert cuda.registered == {}
        # Slower, but it works: vLLM goes on with unpinned memory.
        made.create_next_worker_view(PAGE)[0, 0] = 1


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("canonical", [False, True])
def test_vllms_worker_takes_its_views(version: str, canonical: bool, cuda: Cuda) -> None:
    code = vllms_code(version, cuda)
    pages, factor = (3000, 5000), 2
    caches = SimpleNamespace(
        tensors=[
            SimpleNamespace(page_size_bytes=n, tensor=torch.zeros(4 * n, dtype=torch.int8))
            for n in pages
        ],
        group_data_refs=[],
    )
    slot = factor * sum(pages)
    row = -(-3 * slot // PAGE) * PAGE
    with region(6, row, slot, rank=2) as made:
        worker = code.CPUOffloadingWorker(caches, factor, 6, made, canonical)
        tensors = worker._store_handler.given["cpu_tensors"]
        offsets = [t.data_ptr() - made._base.data_ptr() for t in tensors]
        start = 0 if canonical else 2 * slot
        assert offsets == [start, start + factor * 3000]
        for tensor, page in zip(tensors, pages, strict=True):
            assert tensor.shape == (6, factor * page)
            assert tensor.stride() == (row, 1)
            assert tensor.dtype == torch.int8
        assert made.is_pinned
        del tensors, worker
    assert made._base is None
