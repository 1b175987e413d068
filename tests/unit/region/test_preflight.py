# SPDX-License-Identifier: Apache-2.0
"""Every shortage is one line that names the need, what there is, and what to change."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_tiered_offload.region import cgroup, preflight
from vllm_tiered_offload.region.settings import RegionError

GIB = 1 << 30
TWO_MB = 2 << 20


class Host:
    """A made-up host: /proc and /sys under a temporary root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.meminfo(64 * GIB)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def meminfo(self, available: int, huge: int = TWO_MB) -> None:
        text = f"MemTotal: 1 kB\nMemAvailable: {available >> 10} kB\nHugePages_Total: 0\n"
        self.write("proc/meminfo", text + f"Hugepagesize: {huge >> 10} kB")

    def v2(
        self, group: str, limit: object, used: int, cache: int = 0, mount: str = "/"
    ) -> None:
        self.write("proc/self/mountinfo", _mount(mount, "cgroup2 cgroup rw"))
        directory = f"sys/fs/cgroup{group}"
        self.write(f"{directory}/memory.max", limit)
        self.write(f"{directory}/memory.current", used)
        self.write(f"{directory}/memory.stat", f"anon 5\ninactive_file {cache}\nactive_file 0")

    def v1(self, group: str, limit: int, used: int, cache: int = 0) -> None:
        self.write("proc/self/mountinfo", _mount("/", "cgroup cgroup rw,memory"))
        directory = f"sys/fs/cgroup{group}"
        self.write(f"{directory}/memory.limit_in_bytes", limit)
        self.write(f"{directory}/memory.usage_in_bytes", used)
        self.write(f"{directory}/memory.stat", f"total_inactive_file {cache}\nrss 7")

    def pool(self, kib: int, total: int, free: int, reserved: int = 0, over: int = 0) -> None:
        directory = f"sys/kernel/mm/hugepages/hugepages-{kib}kB"
        for name, value in (
            ("nr_hugepages", total),
            ("free_hugepages", free),
            ("resv_hugepages", reserved),
            ("surplus_hugepages", 0),
            ("nr_overcommit_hugepages", over),
        ):
            self.write(f"{directory}/{name}", value)

    def check(self, need: int, backing: str = "memfd", huge: int = 0) -> None:
        preflight.check(need, backing, huge, self.root)


def _mount(root: str, kind: str) -> str:
    return f"30 1 0:26 {root} /sys/fs/cgroup rw shared:4 - {kind}"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_free_memory(host: Host) -> None:
    host.check(64 * GIB)
    with pytest.raises(
        RegionError, match=r"needs 65.00 GiB .*host has 64.00 GiB .*cpu_bytes_to_use"
    ):
        host.check(65 * GIB)


def test_the_limit_may_be_on_any_level_up_in_v2(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/kubepods/pod/container")
    host.v2("/kubepods/pod/container", "max", GIB)
    host.v2("/kubepods/pod", 8 * GIB, 5 * GIB, cache=GIB)
    host.check(4 * GIB)  # 3 GiB unused, 1 GiB of page cache that can go
    with pytest.raises(RegionError, match=r"control group allows 4.00 GiB .*more of 8.00 GiB"):
        host.check(4 * GIB + 1)
    host.v2("/kubepods", 2 * GIB, GIB)
    with pytest.raises(RegionError, match=r"kubepods/memory.max"):
        host.check(2 * GIB)


def test_the_limit_may_be_on_any_level_up_in_v1(host: Host) -> None:
    host.write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/")
    host.v1("/docker/abc", 1 << 63, GIB)
    host.check(60 * GIB)
    host.v1("/docker", 3 * GIB, 2 * GIB)
    with pytest.raises(RegionError, match=r"docker/memory.limit_in_bytes.*memory limit"):
        host.check(2 * GIB)


def test_a_container_sees_its_own_group_as_the_top(host: Host) -> None:
    """Without a cgroup namespace the path is the host's, the mount is the container's."""
    host.write("proc/self/cgroup", "0::/docker/abc")
    host.v2("", 2 * GIB, GIB, mount="/docker/abc")
    with pytest.raises(RegionError, match=r"control group allows 1.00 GiB"):
        host.check(2 * GIB)


def test_a_group_beside_the_mount(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/../other")
    host.v2("", 2 * GIB, GIB, mount="/docker/abc")
    assert [limit.available for limit in cgroup.limits(host.root)] == [GIB]


def test_a_host_that_says_nothing_stops_nobody(tmp_path: Path) -> None:
    preflight.check(1 << 50, "memfd", 0, tmp_path)


def test_dev_shm_counts_for_the_file_backing_only(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SimpleNamespace(f_bavail=64, f_frsize=1 << 20)  # Docker's default
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    host.check(GIB)
    host.check(64 << 20, "shm")
    with pytest.raises(RegionError, match=r"/dev/shm has 0.06 GiB .*memfd.*--shm-size"):
        host.check(GIB, "shm")


def test_no_dev_shm(host: Host) -> None:
    with pytest.raises(RegionError, match=r"region_backing 'shm' needs .*No such file"):
        host.check(GIB, "shm")


def test_the_huge_page_pool(host: Host) -> None:
    host.pool(2048, total=600, free=550, reserved=50)
    host.check(500 * TWO_MB, huge=TWO_MB)
    with pytest.raises(
        RegionError, match=r"needs 512 pages of 2048 KiB, but 500 are free.*vm.nr_hugepages=612"
    ):
        host.check(GIB, huge=TWO_MB)
    host.pool(2048, total=600, free=550, reserved=50, over=12)
    host.check(GIB, huge=TWO_MB)


def test_a_pool_of_another_size_is_raised_elsewhere(host: Host) -> None:
    host.pool(1 << 20, total=1, free=1)
    with pytest.raises(RegionError, match=r"echo 3 > .*hugepages-1048576kB/nr_hugepages"):
        host.check(2 * GIB + 1, huge=GIB)


def test_no_pool_at_all(host: Host) -> None:
    with pytest.raises(RegionError, match="no pool of 2048 KiB pages"):
        host.check(GIB, huge=TWO_MB)


def test_reserved_pages_are_not_free_memory(host: Host) -> None:
    host.meminfo(GIB)
    host.pool(2048, total=1024, free=1024)
    host.check(2 * GIB, huge=TWO_MB)


def test_locked_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--ulimit memlock=-1" in preflight.locked_memory_note(GIB)
    assert preflight.locked_memory_note(1 << 20) == ""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert preflight.locked_memory_note(GIB) == ""


def test_memory_of_a_dying_engine_is_waited_for() -> None:
    """As long as it comes back, and no longer."""
    available = iter([10, 40, 70, 100])
    slept: list[float] = []

    def check() -> None:
        now = next(available)
        if now < 100:
            raise preflight.Shortage(now, f"{now} of 100")

    preflight.check_while_growing(check, 100, slept.append)
    assert len(slept) == 3

    available = iter([10, 40, 40, 40])
    with pytest.raises(RegionError, match="40 of 100"):
        preflight.check_while_growing(check, 100, slept.append)
    assert len(slept) == 5


def test_this_host_can_be_read() -> None:
    preflight.check(1, "memfd")
    with pytest.raises(RegionError, match="free memory"):
        preflight.check(1 << 60, "memfd")
