# SPDX-License-Identifier: Apache-2.0
"""CUDA calls of vLLM's transfer worker, played on the CPU.

The KV cache is plain memory that says it is on a GPU, a stream is nothing, an event has
always happened, and a batch of copies is memmove. What vLLM registers as pinned is noted.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu import gpu_worker


class OnGpu(torch.Tensor):
    """Plain memory that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def on_gpu(caches: CanonicalKVCaches) -> CanonicalKVCaches:
    """The same memory, seen by vLLM as a GPU's."""
    for cache in caches.tensors:
        cache.tensor = cache.tensor.as_subclass(OnGpu)
    return caches


class Pinned(dict[int, int]):
    """Registered ranges: address to bytes. `fail_at` refuses the n-th registration."""

    fail_at: int | None = None
    calls = 0

    def register(self, address: int, size: int, *_: Any) -> int:
        """0 as CUDA's success, like cudaHostRegister."""
        self.calls += 1
        if self.calls == self.fail_at:
            return 2
        assert all(address + size <= a or a + s <= address for a, s in self.items())
        self[address] = size
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.pop(address, None) else 1


class _Code(int):
    """A CUDA error as torch has it: a number with a `value`."""

    @property
    def value(self) -> int:
        return int(self)


class _Event:
    def __init__(self, **_: Any) -> None: ...
    def record(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 1.0


class _Stream:
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...


def _copy_batch(
    source: torch.Tensor, target: torch.Tensor, size: torch.Tensor, **_: Any
) -> None:
    for of, to, count in zip(source.tolist(), target.tolist(), size.tolist(), strict=True):
        ctypes.memmove(to, of, count)


def _buffers(count: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(count, dtype=torch.int64) for _ in range(3))


def _platform(real: Any) -> Any:
    fakes = {
        "Stream": _Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": _Stream,
        "is_cuda_alike": lambda: True,
        "is_cuda": lambda: True,
        "is_rocm": lambda: False,
        "is_xpu": lambda: False,
    }

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return fakes[name] if name in fakes else getattr(real, name)

    return Platform()


def play(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    """Replace the CUDA calls of vLLM's worker, in every supported version."""
    pinned = Pinned()
    for name, fake in {
        "ops": SimpleNamespace(swap_blocks_batch=_copy_batch),
        "current_platform": _platform(gpu_worker.current_platform),
        "PIN_MEMORY": True,
        "HAS_TRITON": False,
        "_new_descriptor_buffers": _buffers,
    }.items():
        monkeypatch.setattr(gpu_worker, name, fake)
    monkeypatch.setattr(torch, "Event", _Event)
    _play_registration(monkeypatch, pinned)
    return pinned


def _play_registration(monkeypatch: pytest.MonkeyPatch, pinned: Pinned) -> None:
    if hasattr(gpu_worker, "host_register"):  # vLLM 0.32 on
        from vllm.v1.kv_offload.cpu import host_register

        def register(address: int, size: int) -> bool:
            return pinned.register(address, size) == 0

        for module in (gpu_worker, host_register):
            monkeypatch.setattr(module, "host_register", register)
            monkeypatch.setattr(module, "host_unregister", pinned.unregister)
        return
    runtime = SimpleNamespace(
        cudaHostRegister=pinned.register,
        cudaHostUnregister=pinned.unregister,
        cudaGetLastError=lambda: 0,
    )
    if hasattr(gpu_worker, "CudaRTLibrary"):  # vLLM 0.31
        monkeypatch.setattr(gpu_worker, "CudaRTLibrary", lambda: runtime)
    # vLLM 0.30, and the region's clean-up before 0.32.
    codes = SimpleNamespace(
        cudaHostRegister=lambda *a: _Code(pinned.register(*a)),
        cudaHostUnregister=lambda a: _Code(pinned.unregister(a)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: codes)
