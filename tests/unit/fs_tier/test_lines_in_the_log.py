# SPDX-License-Identifier: Apache-2.0
"""The start-up lines, and the loss of direct I/O afterwards."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from vllm_tiered_offload.fs_tier.banner import banner
from vllm_tiered_offload.fs_tier.direct_watch import DirectIoWatch
from vllm_tiered_offload.ratelog import RateLimitedLog


@dataclass(frozen=True)
class Root:
    path: str = "/kv"
    direct_read: bool = True
    direct_write: bool = True


class Disk:
    """A watched disk whose state the test sets; one tick a second."""

    def __init__(self) -> None:
        self.roots = [Root()]
        self.now = 0.0
        log = RateLimitedLog(logging.getLogger("watch-test"), clock=lambda: self.now)
        self.watch = DirectIoWatch(
            lambda: SimpleNamespace(roots=tuple(self.roots)), log, clock=lambda: self.now
        )

    def becomes(self, seconds: float = 1.0, **state: object) -> None:
        self.roots = [dataclasses.replace(root, **state) for root in self.roots]
        self.now += seconds
        self.watch.tick()


@pytest.fixture
def disk(caplog: pytest.LogCaptureFixture) -> Disk:
    caplog.set_level(logging.INFO)
    return Disk()


def test_a_steady_disk_is_silent(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        disk.becomes()
    assert not caplog.records


def test_a_flapping_disk_is_thinned_out(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(40):
        disk.becomes(direct_read=n % 2 == 0)
    assert len(caplog.records) == 1
    disk.becomes(seconds=60, direct_read=True)
    disk.becomes(direct_read=False)
    assert "19 similar lines suppressed" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_the_loss_of_direct_io_is_reported(
    disk: Disk, caplog: pytest.LogCaptureFixture, direction: str
) -> None:
    disk.becomes(**{f"direct_{direction}": False})
    assert f"direct {direction}" in caplog.text


def test_ticks_within_a_second_cost_no_look(disk: Disk) -> None:
    disk.watch.tick()
    disk.roots = []
    disk.becomes(seconds=0.5)  # would fail on nothing to replace, had it looked
    disk.roots = [Root(path="/other", direct_read=False)]
    disk.becomes(seconds=1)  # a root never seen before is not a change


ROOT = {
    "path": "/nvme0",
    "file_system": "ext4",
    "read_only_because": None,
    "direct_io": True,
    "buffered_because": None,
    "slots": 63,
    "segment_bytes": 16 << 20,
    "writers": 2,
    "max_bytes": 1 << 30,
    "min_free_bytes": 0,
    "recovered_chunks": 7,
    "recovery_seconds": 0.0123456,
}
OTHER_ROOT = {
    **ROOT,
    "path": "/nfs",
    "file_system": "nfs4",
    "read_only_because": "locks do not work",
    "direct_io": False,
    "buffered_because": "EINVAL",
    "writers": 0,
    "max_bytes": None,
    "min_free_bytes": 10 << 30,
}


def test_the_banner_says_who_shares_and_how_each_root_is_used() -> None:
    namespace = SimpleNamespace(fingerprint="ab" * 20, private=True)
    facts = {"chunk_bytes": 4096, "io_bytes": 16 << 20, "roots": [ROOT, OTHER_ROOT]}
    lines = banner("1:odirect_fs", facts, SimpleNamespace(namespace=namespace))
    assert lines == [
        "disk tier 1:odirect_fs: namespace abababababababab, private to this process; "
        "chunks of 4KiB, I/O of up to 16MiB",
        "  /nvme0: ext4, read and write, direct I/O, 63 segments of 16MiB, "
        "2 written at a time, at most 1GiB, "
        "7 chunks found in 0.012 s",
        "  /nfs: nfs4, read only (locks do not work), buffered I/O (EINVAL), "
        "63 segments of 16MiB, 10GiB left free, 7 chunks found in 0.012 s",
    ]
