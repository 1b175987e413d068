# SPDX-License-Identifier: Apache-2.0
"""Undoing what vLLM's GPU worker did to the region: host registration for DMA.

vLLM registers (`pin_mmap_region`) and leaves it to the region to unregister.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_tiered_offload.region.seat import logger


def _vllm_unregister() -> Callable[[int], object]:
    """The counterpart of how this vLLM registers."""
    try:
        from vllm.v1.kv_offload.cpu.host_register import host_unregister
    except ImportError:
        return _cuda_unregister  # vLLM 0.30 and 0.31 know CUDA and ROCm only
    unregister_one: Callable[[int], object] = host_unregister
    return unregister_one


def _cuda_unregister(address: int) -> None:
    import torch

    result = torch.cuda.cudart().cudaHostUnregister(address)
    code = getattr(result, "value", result)
    if code:
        logger.warning("cudaHostUnregister of the region failed with code %s", code)


def unregister(addresses: Sequence[int]) -> None:
    """Unregister in reverse order. Never raises: the memory has to go in any case."""
    host_unregister = _vllm_unregister()
    for address in reversed(addresses):
        try:
            host_unregister(address)
        except Exception:
            logger.warning("Could not unregister the region at %#x", address, exc_info=True)
