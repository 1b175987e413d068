# SPDX-License-Identifier: Apache-2.0
"""From a request to mapped, pre-faulted memory that all ranks share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tiered_offload.region import huge_pages, numa, prefault, preflight
from vllm_tiered_offload.region.claim import Claim
from vllm_tiered_offload.region.file_place import sweep
from vllm_tiered_offload.region.layout import Layout, round_up
from vllm_tiered_offload.region.mapping import Mapping as MemoryMapping
from vllm_tiered_offload.region.meeting import open_meeting
from vllm_tiered_offload.region.seat import CreatorDied, Joining, Seat, logger
from vllm_tiered_offload.region.settings import RegionError, RegionSettings
from vllm_tiered_offload.region.wire import encode_facts

# Seconds a worker waits for the others at the end of joining.
WORKER_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """What one process asks for; see `SharedOffloadRegion`."""

    engine_id: str
    rank: int | None
    slot: int | None
    world_size: int
    settings: RegionSettings
    facts: Mapping[str, object] | None = None
    scheduler_joins: bool = True
    memory_check: Callable[[int], None] | None = None
    populate_shard: tuple[int, int] | None = None

    def joining(self, layout: Layout) -> Joining:
        """The same in the hand-over's words. Raises `RegionError`."""
        if self.rank is not None and not 0 <= self.rank < self.world_size:
            raise RegionError(f"rank {self.rank} is not one of {self.world_size} workers")
        settings = self.settings
        claim = Claim.make(
            engine_id=self.engine_id,
            num_chunks=layout.num_chunks,
            row_bytes=layout.row_bytes,
            slot_bytes=layout.slot_bytes,
            world_size=self.world_size,
            backing=settings.backing,
            huge_pages=settings.huge_pages,
        )
        huge_bytes = settings.explicit_huge_bytes
        return Joining(
            claim=claim,
            rank=self.rank,
            facts=encode_facts(self.facts),
            scheduler_joins=self.scheduler_joins,
            length=round_up(layout.total_bytes, huge_bytes or layout.page),
            huge_bytes=huge_bytes,
            timeout=settings.join_timeout,
        )

    def check_memory(self, joining: Joining, backing: str) -> None:
        """Before the memory is made. Raises `RegionError`, or what the caller's check does."""
        for path in sweep():
            logger.info("Region: removed %s, left by an engine that is dead", path)
        if self.memory_check is not None:
            self.memory_check(joining.length)
        need, huge_bytes = joining.length, joining.huge_bytes
        preflight.check_while_growing(lambda: preflight.check(need, backing, huge_bytes), need)


@dataclass(slots=True)
class Opened:
    """The region as this process has it. Sizes in bytes, times in seconds."""

    seat: Seat
    mapping: MemoryMapping
    settings: RegionSettings
    prefault_seconds: float = 0.0

    @property
    def ranks(self) -> dict[int, dict[str, Any]]:
        return self.seat.ranks

    def huge_bytes(self) -> int:
        """Bytes that really are huge pages in this process's mapping."""
        if self.settings.explicit_huge_bytes:
            return self.mapping.length
        return huge_pages.mapped_huge_bytes(self.mapping.address, self.mapping.length)

    def describe(self) -> dict[str, object]:
        huge = self.huge_bytes()
        wanted = self.settings.huge_pages == "auto" and self.settings.prefault
        return {
            "backing": self.seat.backing,
            "huge_bytes": huge,
            "huge_hint": huge_pages.hint(self.seat.backing) if wanted and not huge else "",
            "prefault_seconds": self.prefault_seconds,
        }

    def close(self, reason: str = "") -> bool:
        """Leave the hand-over and unmap; False when something still uses the memory."""
        self.seat.close(reason)
        return self.mapping.release()


def open_region(request: Request, layout: Layout) -> Opened:
    """The region, mapped by all ranks when this is a worker. Raises `RegionError`."""
    joining = request.joining(layout)
    deadline = joining.clock() + joining.timeout
    while True:
        try:
            return _open_once(request, layout, joining, deadline)
        except CreatorDied:
            logger.warning(
                "Region of engine %s: the process that made it died; choosing another",
                request.engine_id,
            )
        if joining.clock() >= deadline:
            raise RegionError(
                f"the region of engine {request.engine_id}: its makers keep dying "
                f"(for {joining.timeout:.0f} s, region_join_timeout)"
            )


def _open_once(request: Request, layout: Layout, joining: Joining, deadline: float) -> Opened:
    settings = request.settings
    seat = open_meeting(joining).take_seat(lambda b: request.check_memory(joining, b))
    mapping = None
    try:
        granule = huge_pages.granule(settings, layout.page)
        mapping = MemoryMapping(seat.fileno(), joining.length, granule)
        huge_pages.advise(mapping, settings)
        opened = Opened(seat, mapping, settings)
        seat.mapped()
        if settings.prefault:
            opened.prefault_seconds = _prefault(request, layout, mapping, granule)
        if request.rank is not None:
            _wait_for_workers(seat, joining, deadline)
            if seat.created:
                _say_what_was_made(opened, joining, layout)
    except BaseException as error:
        seat.close(f"{joining.who}: {error}")
        if mapping is not None:
            mapping.release()
        raise
    return opened


def _wait_for_workers(seat: Seat, joining: Joining, deadline: float) -> None:
    # Waiting lets all choose anew when the maker of the memory dies meanwhile.
    # Not for ever: workers on other hosts never come, which is the scheduler's
    # to tell; and one that comes later still gets the memory.
    patient = min(deadline, joining.clock() + WORKER_PATIENCE)
    if not seat.wait_for_all(patient):
        logger.warning(
            "Region of engine %s: not all workers are here; %s goes on without them",
            joining.claim.engine_id,
            joining.who,
        )


def _prefault(request: Request, layout: Layout, mapping: MemoryMapping, granule: int) -> float:
    index, count, slot = 0, 1, None
    if request.populate_shard is not None:
        index, count = request.populate_shard
    elif request.rank is not None:
        index, count = request.rank, request.world_size
        if request.slot == request.rank and numa.node_count() > 1:
            slot = request.slot
    ranges = prefault.plan(layout, mapping.length, granule, index=index, count=count, slot=slot)
    total = -(-mapping.length // count)
    populate = prefault.Populate(mapping, layout.page)
    who = f"Region of engine {request.engine_id}, {request.joining(layout).who}"
    return prefault.Prefault(populate, prefault.thread_count(count), who).run(ranges, total)


def _say_what_was_made(opened: Opened, joining: Joining, layout: Layout) -> None:
    facts = opened.describe()
    hint = f" ({facts['huge_hint']})" if facts["huge_hint"] else ""
    logger.info(
        "Region of engine %s: %d chunks of %d bytes, %d bytes in all, %s, %d bytes of it in "
        "huge pages%s, %d worker(s), pre-faulted in %.1f s",
        joining.claim.engine_id,
        layout.num_chunks,
        layout.row_bytes,
        layout.total_bytes,
        facts["backing"],
        facts["huge_bytes"],
        hint,
        len(opened.ranks),
        opened.prefault_seconds,
    )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        note = preflight.locked_memory_note(joining.length)
        if note:
            logger.warning("Region: %s", note)
