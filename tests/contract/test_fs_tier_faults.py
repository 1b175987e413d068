# SPDX-License-Identifier: Apache-2.0
"""A disk that fails under the tier: what vLLM is told, what the operator sees."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.support import tier as support
from tests.support.tier import PAGE, finished, job, key, make_config, make_spec
from vllm_tiered_offload.fs_tier import wiring
from vllm_tiered_offload.fs_tier.manager import ODirectFsTier
from vllm_tiered_offload.fs_tier.metrics import PREFIX
from vllm_tiered_offload.store import ChunkStore
from vllm_tiered_offload.store.syscalls import Syscalls

ROWS = 8
TIER = "odirect_fs"


class FailingDisk(Syscalls):
    """Fails every read, or every write, with an errno while it is set."""

    read_errno = 0
    write_errno = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.read_errno:
            raise OSError(self.read_errno, os.strerror(self.read_errno))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.write_errno:
            raise OSError(self.write_errno, os.strerror(self.write_errno))
        return super().pwritev(fd, buffers, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    disk = FailingDisk()
    monkeypatch.setattr(wiring, "ChunkStore", functools.partial(ChunkStore, syscalls=disk))
    return disk


@pytest.fixture
def tier(disk: FailingDisk, tmp_path: Path) -> Iterator[ODirectFsTier]:
    memory = support.page_aligned(ROWS * PAGE)
    made = ODirectFsTier(
        offloading_spec=make_spec(make_config()),
        primary_kv_view=memory.cast("b", (ROWS, PAGE)),
        tier_type=TIER,
        root_dir=str(tmp_path),
        max_bytes="64MiB",
        cache_namespace="test",
    )
    yield made
    disk.read_errno = disk.write_errno = 0
    made.shutdown()


class Report:
    """The last value of each gauge and the sum of each counter, as vLLM keeps them."""

    def __init__(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )

        self._stats = OffloadingConnectorStats()

    def value(self, tier: ODirectFsTier, name: str, *labels: str) -> Any:
        self._stats.aggregate(tier.get_stats())
        return self._stats.data["data"][PREFIX + name][(TIER, *labels)]


def test_a_disk_that_cannot_be_read_costs_the_chunk_and_is_counted(
    tier: ODirectFsTier, disk: FailingDisk, tmp_path: Path
) -> None:
    tier.submit_store(job(0, [key(1), key(2)], [0, 1]))
    assert finished(tier, 1)[0].success
    disk.read_errno = errno.EIO
    tier.submit_load(job(1, [key(1), key(2)], [2, 3], load=True))
    result = finished(tier, 1)[1]
    assert not result.success
    assert not result.successful_keys
    request = support.request()
    assert tier.lookup(key(1), request) is LookupResult.MISS
    assert tier.lookup(key(2), request) is LookupResult.MISS
    report = Report()
    assert report.value(tier, "io_errors", str(tmp_path), "read", "EIO") >= 1
    assert report.value(tier, "failed_chunks", "io_error") == 2
    assert report.value(tier, "io_errors", str(tmp_path), "write", "EIO") == 0


def test_a_disk_that_cannot_be_written_fails_the_store_and_loads_go_on(
    tier: ODirectFsTier, disk: FailingDisk, tmp_path: Path
) -> None:
    tier.submit_store(job(0, [key(1)], [0]))
    assert finished(tier, 1)[0].success
    disk.write_errno = errno.EIO
    tier.submit_store(job(1, [key(2)], [1]))
    # vLLM's backpressure hears of it as a failure, not as a fast store.
    assert not finished(tier, 1)[1].success
    report = Report()
    assert report.value(tier, "io_errors", str(tmp_path), "write", "EIO") >= 1
    assert report.value(tier, "stores_paused", str(tmp_path)) == 1
    tier.submit_load(job(2, [key(1)], [2], load=True))
    assert finished(tier, 1)[2].success


def test_a_full_disk_drops_stores_without_failing_them(
    tier: ODirectFsTier, disk: FailingDisk, tmp_path: Path
) -> None:
    disk.write_errno = errno.ENOSPC
    tier.submit_store(job(0, [key(1)], [0]))
    result = finished(tier, 1)[0]
    assert result.success
    support.assert_moved(result, 0)
    report = Report()
    assert report.value(tier, "stores_paused", str(tmp_path)) == 1
    assert report.value(tier, "dropped_chunks", "full") == 1
    assert tier.lookup(key(1), support.request()) is LookupResult.MISS
