# SPDX-License-Identifier: Apache-2.0
"""How fast the pool's memory is made: our region against vLLM's own, in one run.

    python benchmarks/region.py --size 8GiB --workers 2
    python benchmarks/region.py --configure     # as root: with huge pages, put back afterwards

Time is from the first worker's constructor to the last one's return, pages taken.
On a busy machine CPU time says more than GB/s.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import time
import uuid
from collections.abc import Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_tiered_offload.config import parse_size
from vllm_tiered_offload.region.huge_pages import hint

SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
POOL = Path("/proc/sys/vm/nr_hugepages")
TWO_MB = 2 << 20
VARIANTS = {
    "vLLM's region": None,
    "4 KiB pages": "off",
    "transparent huge pages": "auto",
    "reserved 2 MiB pages": "2MB",
}


def _open(huge: str | None, arguments: dict[str, Any], world_size: int) -> Any:
    if huge is None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion as Theirs

        return Theirs(**arguments)
    from vllm_tiered_offload.region.shared_region import RegionSettings, SharedOffloadRegion

    settings = RegionSettings(huge_pages=huge)  # type: ignore[arg-type]
    return SharedOffloadRegion(world_size=world_size, settings=settings, **arguments)


def _worker(
    huge: str | None,
    arguments: dict[str, Any],
    world_size: int,
    start: Barrier,
    results: Queue[Any],
    done: Event,
) -> None:
    import torch  # noqa: F401, its import is not what is measured

    if huge is None:
        import vllm.v1.kv_offload.cpu.shared_offload_region  # noqa: F401
    start.wait()
    begin, cpu = time.monotonic(), time.process_time()
    try:
        region = _open(huge, arguments, world_size)
    except Exception as error:
        results.put(str(error))
        return
    end, cpu = time.monotonic(), time.process_time() - cpu
    huge_bytes = region.describe()["huge_bytes"] if huge is not None else 0
    results.put((begin, end, cpu, huge_bytes))
    done.wait()
    region.cleanup()


def measure(
    huge: str | None, size: int, chunk: int, workers: int
) -> tuple[float, float, int] | str:
    """Seconds until all workers have it, CPU seconds, bytes in huge pages; or why not."""
    context = multiprocessing.get_context("spawn")
    start, done = context.Barrier(workers), context.Event()
    results: Queue[Any] = context.Queue()
    engine_id = f"benchmark-{uuid.uuid4()}"
    sizes = {"num_chunks": size // chunk, "kv_bytes_per_chunk": chunk}
    processes = []
    for rank in range(workers):
        arguments = {"engine_id": engine_id, "rank": rank, "cpu_page_size": chunk // workers}
        work = (huge, sizes | arguments, workers, start, results, done)
        processes.append(context.Process(target=_worker, args=work))
    for process in processes:
        process.start()
    answers = [results.get() for _ in processes]
    done.set()
    for process in processes:
        process.join()
    for answer in answers:
        if isinstance(answer, str):
            return answer
    begins, ends, cpu, huge_bytes = zip(*answers, strict=True)
    return max(ends) - min(begins), sum(cpu), min(huge_bytes)


@contextlib.contextmanager
def configured(wanted: bool, size: int) -> Iterator[None]:
    """With `wanted`: huge pages allowed and reserved, and the settings put back."""
    before = {file: file.read_text() for file in (SHMEM, POOL)} if wanted else {}
    try:
        if wanted:
            SHMEM.write_text("advise")
            POOL.write_text(str(size // TWO_MB + 1))
        yield
    finally:
        for file, text in before.items():
            file.write_text(text.partition("[")[2].partition("]")[0] or text)


def main(
    size: Annotated[str, typer.Option(help="Size of the pool.")] = "4GiB",
    chunk: Annotated[str, typer.Option(help="Bytes per chunk, all workers.")] = "2MiB",
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 1,
    rounds: Annotated[int, typer.Option(help="Runs of each; the best counts.")] = 3,
    configure: Annotated[
        bool, typer.Option(help="Allow and reserve huge pages for the run (root).")
    ] = False,
) -> None:
    """Print GB/s of pool made, ours against vLLM's."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    total = parse_size(size)
    row = -(-parse_size(chunk) // mmap.PAGESIZE) * mmap.PAGESIZE
    table = Table(title=f"{size} pool, {chunk} chunks, {workers} worker(s), best of {rounds}")
    for name in ("region", "s", "GB/s", "against vLLM", "CPU s/GB", "huge"):
        table.add_column(name, justify="left" if name == "region" else "right")
    base = None
    with configured(configure, total):
        for name, huge in VARIANTS.items():
            runs = [measure(huge, total, row, workers) for _ in range(rounds)]
            good = [run for run in runs if not isinstance(run, str)]
            if not good:
                table.add_row(name, "-", "-", "-", "-", str(runs[0])[:60])
                continue
            seconds, cpu, huge_bytes = min(good)
            base = base or seconds
            table.add_row(
                name,
                f"{seconds:.2f}",
                f"{total / seconds / 1e9:.1f}",
                f"{base / seconds:.1f} x",
                f"{cpu / total * 1e9:.2f}",
                f"{100 * huge_bytes / total:.0f} %",
            )
        if hint("memfd"):
            table.caption = f"No transparent huge pages: {hint('memfd')}"
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
