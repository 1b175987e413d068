# SPDX-License-Identifier: Apache-2.0
"""Opening a root: what is found out about it, and its parts put together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_tiered_offload.store import direct_io
from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.api import Namespace, StoreError, StoreSettings
from vllm_tiered_offload.store.descriptors import Descriptors
from vllm_tiered_offload.store.eviction import SecondChance
from vllm_tiered_offload.store.geometry import writers_of
from vllm_tiered_offload.store.index import Index
from vllm_tiered_offload.store.io_pool import IoPool
from vllm_tiered_offload.store.jobs import JobTable
from vllm_tiered_offload.store.parts import Parts
from vllm_tiered_offload.store.root import Root, open_root
from vllm_tiered_offload.store.slots import Slots
from vllm_tiered_offload.store.syscalls import Syscalls, explain
from vllm_tiered_offload.store.watch import Pause, Watch

MOST_POLICY_CHUNKS = 1 << 24  # an unbounded root: the policy's tables must end somewhere


@dataclass(frozen=True, slots=True)
class Shared:
    """What the roots of one store have in common."""

    index: Index
    jobs: JobTable
    forget_storing: Callable[[Sequence[bytes]], None]
    drain_hits: Callable[[], None]
    syscalls: Syscalls
    clock: Callable[[], float]
    page_bytes: int  # of a root that is made


def open_parts(
    number: int,
    path: Path,
    settings: StoreSettings,
    namespace: Namespace,
    row: memoryview,
    *,
    shared: Shared,
) -> tuple[Parts, str | None]:
    """The parts, and why direct I/O is not used, if so. Raises StoreError in one line."""
    syscalls, clock, chunk_bytes = shared.syscalls, shared.clock, len(row)
    root = open_root(path, settings, chunk_bytes, syscalls, shared.page_bytes)
    refusal = _direct_refusal(root, settings, syscalls, row)
    io = direct_io.BlockIO(syscalls, root.geometry.page_bytes, direct=refusal is None)
    parts = Parts(
        number=number,
        settings=settings,
        namespace=namespace,
        chunk_bytes=chunk_bytes,
        threads=writers_of(settings, root.slots_when_full),
        root=root,
        syscalls=syscalls,
        io=io,
        slots=Slots(root, syscalls, io),
        index=shared.index,
        jobs=shared.jobs,
        pool=IoPool(f"vto-disk{number}", settings.store_queue_bytes),
        descriptors=Descriptors(io),
        policy=SecondChance(_capacity(root, chunk_bytes)),
        watch=Watch(clock),
        pause=Pause(root.path, clock),
        forget_storing=shared.forget_storing,
        drain_hits=shared.drain_hits,
        clock=clock,
    )
    return parts, refusal


def _direct_refusal(
    root: Root, settings: StoreSettings, syscalls: Syscalls, row: memoryview
) -> str | None:
    """Why the root is not used with direct I/O; None if it is."""
    if settings.direct_io == "off":
        return "direct_io is 'off'"
    if root.read_only_because is not None:
        return None  # nothing may be written to find out; a refusal shows when reading
    page = root.geometry.page_bytes
    pad = direct_io.page_aligned(fmt.round_up(len(row), page) - len(row))
    try:
        reason = direct_io.refusal(root.path, syscalls, page, row, pad)
    except OSError as error:
        raise StoreError(f"root_dir {root.path}: {explain(error)}") from error
    if reason is not None and settings.direct_io == "on":
        raise StoreError(f"root_dir {root.path}: direct_io = 'on', but {reason}")
    return reason


def _capacity(root: Root, chunk_bytes: int) -> int:
    """About how many chunks the root holds when full."""
    return max(1, min(MOST_POLICY_CHUNKS, root.bytes_when_full // chunk_bytes))


def file_system_of(path: str) -> str:
    """Type of the file system a path is on, as /proc/mounts calls it."""
    best, kind = "", "unknown"
    real = os.path.realpath(path)
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _, point, found, *_ = line.split(" ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, found
    return kind
