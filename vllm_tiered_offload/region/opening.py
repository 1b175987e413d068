# SPDX-License-Identifier: Apache-2.0
"""From a request to mapped, pre-faulted memory that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_tiered_offload.region import backing, huge_pages, prefault, preflight
from vllm_tiered_offload.region.claim import Claim
from vllm_tiered_offload.region.forks import PrivateFd
from vllm_tiered_offload.region.layout import Layout, round_up
from vllm_tiered_offload.region.mapping import Mapping as MemoryMapping
from vllm_tiered_offload.region.meeting import open_meeting
from vllm_tiered_offload.region.seat import CreatorDied, Joining, Seat, logger
from vllm_tiered_offload.region.settings import RegionError, RegionSettings
from vllm_tiered_offload.region.wire import encode_facts


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
        if self.rank is not None and not 0 <= self.rank < self.world_size:
            raise RegionError(f"rank {self.rank} is not one of {self.world_size} workers")
        claim = Claim.make(
            engine_id=self.engine_id,
            num_chunks=layout.num_chunks,
            row_bytes=layout.row_bytes,
            slot_bytes=layout.slot_bytes,
            world_size=self.world_size,
            backing=self.settings.backing,
            huge_pages=self.settings.huge_pages,
        )
        return Joining(
            claim,
            self.rank,
            encode_facts(self.facts),
            self.scheduler_joins,
            self.settings.join_timeout,
        )


@dataclass(slots=True)
class Opened:
    """The region as this process has it."""

    seat: Seat
    mapping: MemoryMapping
    settings: RegionSettings
    prefault_seconds: float = 0.0
    notes: dict[str, object] = field(default_factory=dict)

    @property
    def ranks(self) -> dict[int, dict[str, Any]]:
        return self.seat.ranks

    def huge_bytes(self) -> int:
        if self.settings.explicit_huge_bytes:
            return self.mapping.length
        return huge_pages.mapped_huge_bytes(self.mapping.address, self.mapping.length)

    def describe(self) -> dict[str, object]:
        return {
            "backing": self.settings.backing,
            "huge_bytes": self.huge_bytes(),
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
    length = round_up(layout.total_bytes, settings.explicit_huge_bytes or layout.page)

    def make() -> PrivateFd:
        if request.memory_check is not None:
            request.memory_check(layout.total_bytes)
        preflight.check(length, settings)
        return PrivateFd(backing.make_memfd(length, settings.explicit_huge_bytes))

    seat = open_meeting(joining).take_seat(make)
    mapping = None
    try:
        if not seat.created:
            backing.check_received(seat.fileno(), length)
        granule = huge_pages.granule(settings, layout.page)
        mapping = MemoryMapping(seat.fileno(), length, granule)
        huge_pages.advise(mapping, settings)
        opened = Opened(seat, mapping, settings)
        seat.mapped()
        if settings.prefault:
            opened.prefault_seconds = _prefault(request, layout, mapping, granule)
        if request.rank is not None:
            seat.wait_for_all(deadline)
    except BaseException as error:
        seat.close(f"{joining.who}: {error}")
        if mapping is not None:
            mapping.release()
        raise
    return opened


def _prefault(request: Request, layout: Layout, mapping: MemoryMapping, granule: int) -> float:
    index, count, slot = 0, 1, None
    if request.populate_shard is not None:
        index, count = request.populate_shard
    elif request.rank is not None:
        index, count, slot = request.rank, request.world_size, None
    ranges = prefault.plan(layout, mapping.length, granule, index=index, count=count, slot=slot)
    total = sum(length for _, length in ranges)
    populate = prefault.Populate(mapping, layout.page)
    who = "scheduler" if request.rank is None else f"rank {request.rank}"
    return prefault.Prefault(populate, prefault.thread_count(count), who).run(ranges, total)
