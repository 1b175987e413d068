# SPDX-License-Identifier: Apache-2.0
"""Moves planned bytes between two places in this process's memory."""

from __future__ import annotations

import ctypes

from vllm_tiered_offload.worker.plan import Copies


def run(copies: Copies, store: bool) -> None:
    """Copy device to host (`store`) or back; the GIL is free while bytes move."""
    source, target = (copies.device, copies.host) if store else (copies.host, copies.device)
    memmove = ctypes.memmove
    for to, of, size in zip(
        target.tolist(), source.tolist(), copies.size.tolist(), strict=True
    ):
        memmove(to, of, size)
