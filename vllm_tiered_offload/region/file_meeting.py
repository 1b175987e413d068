# SPDX-License-Identifier: Apache-2.0
"""Meeting over a file in /dev/shm, for hosts without memfd or without unix sockets."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable

from vllm_tiered_offload.region.claim import name_of
from vllm_tiered_offload.region.file_place import FilePlace, try_lock
from vllm_tiered_offload.region.forks import PrivateFd
from vllm_tiered_offload.region.patience import Patience
from vllm_tiered_offload.region.seat import Awaited, Joining, Seat
from vllm_tiered_offload.region.settings import RegionError

_POLL = 0.05


class FileSeat(Seat):
    """Holds the region's file, LOCK_SH, and the rank's record, LOCK_EX, for life."""

    backing = "shm"

    def __init__(
        self, joining: Joining, place: FilePlace, region: PrivateFd, record: PrivateFd | None
    ) -> None:
        self._joining = joining
        self._place = place
        self._region = region
        self._record = record  # None for the scheduler
        self._owner = os.getpid()
        self._closed = False
        self._ranks: dict[int, dict[str, object]] = {}

    @property
    def ranks(self) -> dict[int, dict[str, object]]:
        return self._ranks

    def fileno(self) -> int:
        return self._region.fileno()

    def mapped(self) -> None:
        with self._place.locked(make=False) as there:
            if self._record is not None:
                self._write_record(mapped=True)
            elif there and self._place.names(self.fileno()):
                self._ranks = self._present()
                if not self._missing():
                    self._place.remove()  # all have it: the name has done its work

    def _write_record(self, mapped: bool) -> None:
        assert self._record is not None
        value = {"pid": os.getpid(), "mapped": mapped, "facts": self._joining.facts}
        self._place.write(self._record.fileno(), value)

    def _present(self) -> dict[int, dict[str, object]]:
        """Facts of the ranks that live and have the region mapped."""
        present = {}
        for rank in range(self._joining.claim.world_size):
            record = self._place.read(f"rank-{rank}")
            if record.get("mapped") and self._place.is_alive(rank):
                present[rank] = dict(record["facts"])
        return present

    def _missing(self) -> list[int]:
        return [r for r in range(self._joining.claim.world_size) if r not in self._ranks]

    def wait_for_all(self, deadline: float) -> bool:
        joining = self._joining
        awaited = Awaited(joining.claim.engine_id, joining.clock)
        while self._look():
            awaited.tell(self._missing())
            if joining.clock() >= deadline:
                return False
            time.sleep(_POLL)
        return True

    def _look(self) -> bool:
        """Whether ranks are missing. A name that is gone says that none were."""
        world_size = self._joining.claim.world_size
        with self._place.locked(make=False) as there:
            if not there or not self._place.names(self.fileno()):
                self._ranks = {r: self._ranks.get(r, {}) for r in range(world_size)}
                return False
            self._ranks = self._present()
            missing = bool(self._missing())
            if not missing and not self._joining.scheduler_joins:
                self._place.remove()
            return missing

    def close(self, reason: str = "") -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        with self._place.locked(make=False) as there:
            last = there and self._place.names(self.fileno())
            for fd in (self._record, self._region):
                if fd is not None:
                    fd.close()
            if last and not self._place.in_use():
                self._place.remove()


class FileMeeting:
    """Chooses the creator by who locks the directory first, and takes a seat."""

    def __init__(self, joining: Joining, base: str | None = None) -> None:
        self._joining = joining
        name = name_of(joining.claim.engine_id)
        self._place = FilePlace.of(name, base) if base else FilePlace.of(name)
        self._patience = Patience(joining)

    def take_seat(self, check: Callable[[str], None]) -> Seat:
        """A seat; `check` is called with the backing when this process is to create it."""
        while True:
            seat = self._try(check)
            if seat is not None:
                return seat
            time.sleep(_POLL)

    def _try(self, check: Callable[[str], None]) -> FileSeat | None:
        is_worker = self._joining.rank is not None
        with self._place.locked(make=is_worker) as there:
            if there and self._place.in_use():
                return self._join()
            if is_worker:
                self._clear()
                return self._create(check)
            self._patience.nobody()
            return None

    def _clear(self) -> None:
        """Remove a dead engine's files, but not the directory whose lock this holds."""
        for name in os.listdir(self._place.path):
            os.unlink(os.path.join(self._place.path, name))

    def _create(self, check: Callable[[str], None]) -> FileSeat:
        joining = self._joining
        try:
            check(FileSeat.backing)
            region = self._place.open("region", os.O_CREAT | os.O_EXCL)
            fcntl.flock(region.fileno(), fcntl.LOCK_SH)
            os.ftruncate(region.fileno(), joining.length)
            claim = self._place.open("claim", os.O_CREAT)
            self._place.write(claim.fileno(), joining.claim.to_json())
            claim.close()
        except BaseException:
            self._place.remove()
            raise
        seat = self._sit(region)
        assert seat is not None
        seat.created = True
        return seat

    def _join(self) -> FileSeat | None:
        joining = self._joining
        differences = joining.claim.differences(self._place.read("claim"))
        if differences:
            self._patience.refused(f"its makers expect another region: {differences}")
            return None
        region = self._place.open("region")
        fcntl.flock(region.fileno(), fcntl.LOCK_SH)
        size = os.fstat(region.fileno()).st_size
        if size != joining.length:
            raise RegionError(
                f"{self._place.region_path} has {size} bytes, {joining.length} were expected"
            )
        return self._sit(region)

    def _sit(self, region: PrivateFd) -> FileSeat | None:
        joining, place = self._joining, self._place
        if joining.rank is None:
            seat = FileSeat(joining, place, region, None)
            seat._ranks = seat._present()
            if seat._missing() and not self._patience.is_over():
                region.close()
                self._patience.incomplete()
                return None
            return seat
        record = place.open(f"rank-{joining.rank}", os.O_CREAT)
        if not try_lock(record.fileno(), fcntl.LOCK_EX):
            holder = place.read(f"rank-{joining.rank}").get("pid")
            region.close()
            record.close()
            self._patience.duplicate(joining.rank, holder)
            return None
        seat = FileSeat(joining, place, region, record)
        seat._write_record(mapped=False)
        return seat
