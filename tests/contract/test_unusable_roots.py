# SPDX-License-Identifier: Apache-2.0
"""A root that cannot be used stops the engine as any bad value does: one line, by its key."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any

import pytest

from tests.support.tier import make_config, make_spec
from vllm_tiered_offload.config import ConfigError, FsTierSettings
from vllm_tiered_offload.config.spec import tier_prefix
from vllm_tiered_offload.fs_tier import wiring
from vllm_tiered_offload.spec.tiering import AlignedTieringOffloadingSpec
from vllm_tiered_offload.store import Namespace, StoreError

CHUNK = 64 << 10
PREFIX = tier_prefix(1)


def refused(root: str, **keys: Any) -> tuple[str, str]:
    """The key and the rest of the line with which a store on `root` is refused."""
    settings = FsTierSettings.parse({"root_dir": root, "max_bytes": "64MiB", **keys})
    memory = memoryview(mmap.mmap(-1, CHUNK))
    with pytest.raises(ConfigError) as caught:
        wiring.open_store(
            settings, Namespace("0" * 32), memory, CHUNK, events=False, prefix=PREFIX
        )
    line = str(caught.value)
    assert "\n" not in line
    assert isinstance(caught.value.__cause__, OSError)
    return caught.value.key, caught.value.problem


def test_a_place_where_nothing_can_be_made() -> None:
    key, problem = refused("/proc/kv")
    assert key == f"{PREFIX}root_dir"
    assert problem.startswith("/proc/kv: ENOENT")
    assert "must be a directory" in problem


def test_the_spec_says_so_before_memory_is_taken() -> None:
    tiers = [{"type": "fs", "root_dir": "/a"}, {"type": "odirect_fs", "root_dir": "/proc/kv"}]
    with pytest.raises(ConfigError, match=r"secondary_tiers\[1\]\.root_dir: '/proc/kv' "):
        AlignedTieringOffloadingSpec(make_config(tiers))


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "segments").touch()
    key, problem = refused(str(tmp_path))
    assert key == f"{PREFIX}root_dir"
    assert "EEXIST" in problem or "ENOTDIR" in problem


def test_a_damaged_store(tmp_path: Path) -> None:
    (tmp_path / "root.json").write_text("{")
    key, problem = refused(str(tmp_path))
    assert key == f"{PREFIX}root_dir"
    assert "damaged" in problem


def test_a_bound_that_is_too_small_is_named_as_such(tmp_path: Path) -> None:
    key, problem = refused(str(tmp_path), max_bytes="2MiB", n_write_threads=16)
    assert key == f"{PREFIX}max_bytes"
    assert "or more" in problem


@pytest.mark.parametrize(
    ("error", "key", "problem"),
    [
        (
            StoreError("root_dir /a: direct_io = 'on', but EINVAL"),
            "direct_io",
            "/a: direct_io = 'on', but EINVAL; it must be",
        ),
        (StoreError("min_free_bytes = 5 is more than /a has"), "min_free_bytes", "min_free"),
        (OSError(errno.EIO, "Input/output error"), "root_dir", "/a, /b: EIO: Input/output"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a/x"),
            "root_dir",
            "/a/x: EACCES",
        ),
    ],
)
def test_what_else_may_go_wrong(
    monkeypatch: pytest.MonkeyPatch, error: OSError, key: str, problem: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(wiring, "ChunkStore", fail)
    settings = FsTierSettings.parse({"root_dir": ["/a", "/b"]})
    with pytest.raises(ConfigError) as caught:
        wiring.open_store(settings, Namespace("0" * 32), memoryview(b""), CHUNK, events=False)
    assert caught.value.key == f"odirect_fs.{key}"
    assert caught.value.problem.startswith(problem)


def test_the_tier_calls_its_keys_as_the_user_finds_them() -> None:
    tiers = [{"type": "fs", "root_dir": "/a"}, {"type": "odirect_fs", "root_dir": "/proc/kv"}]
    spec = make_spec(make_config(tiers))
    assert wiring.key_prefix({"root_dir": "/proc/kv"}, spec) == PREFIX
    assert wiring.key_prefix({"root_dir": "/elsewhere"}, spec) == "odirect_fs."
    with pytest.raises(ConfigError, match=r"extra_config\.secondary_tiers\[1\]\.root_dir: "):
        wiring.read_settings({"root_dir": "/proc/kv"}, spec)
