# SPDX-License-Identifier: Apache-2.0
"""The CPU platform's transfer worker against one memcpy of the same bytes, in one run.

    python benchmarks/host_worker.py --layers 32 --size 128MiB

"idle": the engine's thread waits; "busy": it runs Python without a pause, and a copy that
gives up the GIL for every page may wait for it as often. "page by page" is that copy alone,
"vectors" the other one that the worker has; it begins with the first and may change over.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated
from unittest import mock

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from vllm_tiered_offload.config import parse_size

PAGES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(repeats))


def while_busy(run: Callable[[], float]) -> float:
    """The result of `run` in another thread, while this one spends its time in Python."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    while thread.is_alive():
        sum(range(500))
    return found[0]


def store(page: int, layers: int, blocks: int) -> Callable[[], None]:
    """One store of random blocks into random chunks; returns once it has landed."""
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from vllm_tiered_offload.worker.host import HostOffloadingWorker

    tensors = [torch.ones(2 * blocks, page, dtype=torch.int8) for _ in range(layers)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, page) for t in tensors],
        [[CanonicalKVCacheRef(i, page) for i in range(layers)]],
    )
    worker = HostOffloadingWorker(caches, 1, 2 * blocks)
    rng = np.random.default_rng(0)
    spec = GPULoadStoreSpec(rng.permutation(2 * blocks)[:blocks].tolist(), [blocks], [0])
    chunks = CPULoadStoreSpec(rng.permutation(2 * blocks)[:blocks].tolist())

    def run() -> None:
        worker.submit_store(0, spec, chunks)
        worker.wait({0})
        worker.get_finished()

    return run


def ways() -> dict[str, AbstractContextManager[object]]:
    from vllm_tiered_offload.worker import copy

    return {
        "worker": nullcontext(),
        "page by page": mock.patch.object(copy, "vector_copy_works", return_value=False),
        "vectors": mock.patch.object(copy, "PATIENCE", -1.0),
    }


def main(
    layers: Annotated[int, typer.Option(help="Tensors of the KV cache.")] = 32,
    size: Annotated[str, typer.Option(help="Bytes that one transfer moves.")] = "128MiB",
    repeats: Annotated[int, typer.Option(help="Measured transfers of each kind.")] = 7,
) -> None:
    total = parse_size(size)
    source, target = (np.ones(total, np.uint8) for _ in range(2))
    table = Table("page", "pages", "copy", "idle GB/s", "of memcpy", "busy GB/s")
    for page in PAGES:
        blocks = max(1, total // layers // page)
        moved = blocks * layers * page
        memcpy = median_seconds(lambda: np.copyto(target, source), repeats) / total
        run = store(page, layers, blocks)
        for name, context in ways().items():
            with context:
                idle = median_seconds(run, repeats) / moved
                busy = while_busy(lambda r=run: median_seconds(r, repeats)) / moved
            rates = (f"{1e-9 / idle:.2f}", f"{memcpy / idle:.2f}", f"{1e-9 / busy:.2f}")
            table.add_row(f"{page >> 10} KiB", str(moved // page), name, *rates)
    Console(width=90).print(table)


if __name__ == "__main__":
    typer.run(main)
