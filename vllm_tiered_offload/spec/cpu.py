# SPDX-License-Identifier: Apache-2.0
"""`AlignedCPUOffloadingSpec`: a CPU pool and nothing below it."""

from __future__ import annotations

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from vllm_tiered_offload.spec.aligned import AlignedSpec


class AlignedCPUOffloadingSpec(AlignedSpec, CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU-only spec without padding, and working on the CPU platform.

    On GPUs the pool lives in the shared region (page-aligned); on the CPU
    platform it is plain tensors, private to each worker.
    """

    BLOCK_SIZE_ALIGNMENT = 1
