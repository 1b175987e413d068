# SPDX-License-Identifier: Apache-2.0
"""Good settings: what is read, defaulted, passed on to vLLM, and ignored."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.config import (
    ConfigError,
    FsTierSettings,
    SpecSettings,
    format_size,
    parse_size,
)

TIER = {"type": "odirect_fs", "root_dir": "/nvme/kv", "max_bytes": "500GiB"}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (34359738368, 32 * GIB),
        ("34359738368", 32 * GIB),
        ("32GiB", 32 * GIB),
        ("32 gib", 32 * GIB),
        ("32Gi", 32 * GIB),
        ("500GB", 500 * 10**9),
        ("1.5TiB", 3 * (1 << 39)),
        ("0.1KiB", 102),
        ("512B", 512),
        ("7 EiB", 7 * (1 << 60)),
        (0, 0),
        (107374182.4, 107374182),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@given(st.integers(0, 2**63 - 1))
def test_a_formatted_size_reads_back(size):
    assert parse_size(format_size(size)) == size


def test_the_readme_example():
    extra = {
        "spec_name": "AlignedTieringOffloadingSpec",
        "cpu_bytes_to_use": "32GiB",
        "secondary_tiers": [TIER],
    }
    settings = SpecSettings.parse(extra, tiering=True)
    assert settings.cpu_bytes_to_use == 32 * GIB
    assert settings.region_backing == "memfd"
    (tier,) = settings.fs_tiers()
    assert tier.root_dir == (Path("/nvme/kv"),)
    assert tier.max_bytes == 500 * GIB
    assert tier.mode == "read_write"


def test_vllm_gets_an_integer_and_everything_else_untouched():
    extra = {"cpu_bytes_to_use": "1GiB", "secondary_tiers": [TIER], "eviction_policy": "arc"}
    passed_on = SpecSettings.parse(extra, tiering=True).vllm_extra_config()
    assert passed_on == {**extra, "cpu_bytes_to_use": GIB}
    assert type(passed_on["cpu_bytes_to_use"]) is int
    # vLLM merges backpressure defaults into the tiers' own dictionaries.
    assert passed_on["secondary_tiers"][0] is TIER
    assert extra["cpu_bytes_to_use"] == "1GiB"


def test_the_size_that_kv_offloading_size_merges_in_is_a_float():
    settings = SpecSettings.parse({"cpu_bytes_to_use": 0.1 * GIB}, tiering=True)
    assert settings.cpu_bytes_to_use == 107374182


def test_every_key_of_vllm_passes_through():
    extra = {
        "spec_name": "AlignedCPUOffloadingSpec",
        "spec_module_path": "vllm_tiered_offload.spec.cpu",
        "cpu_bytes_to_use": 1 << 20,
        "blocks_per_chunk": "4",
        "eviction_policy": "arc",
        "cache_policy_module_path": "mine",
        "store_threshold": 2,
        "max_tracker_size": 10,
        "offload_prompt_only": False,
        "self_describing_kv_events": True,
        "canonical_layout": True,
        "backpressure": {"backpressure_cls": "EMABackpressureDetector"},
        "tier_poll_interval_s": 0.001,
        "sync_load_budget_bytes": 0,
    }
    assert SpecSettings.parse(extra, tiering=False).vllm_extra_config() == extra


def test_tiers_of_others_are_not_checked():
    fs = {"type": "fs", "root_dir": "relative", "n_read_threads": -1, "anything": None}
    other = {"type": "Mine", "module_path": "a.b", "x": 1}
    settings = SpecSettings.parse(
        {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [fs, other]}, tiering=True
    )
    assert settings.fs_tiers() == []
    assert settings.secondary_tiers == (fs, other)


def test_our_class_by_module_path_is_checked():
    tier = {"type": "ODirectFsTier", "module_path": "vllm_tiered_offload.fs_tier.manager"}
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]\.root_dir"):
        SpecSettings.parse({"cpu_bytes_to_use": 1, "secondary_tiers": [tier]}, tiering=True)


def test_several_disks_and_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    tier = FsTierSettings.parse({"root_dir": ["/a/kv/", "~/kv", "/b/../c"]})
    assert tier.root_dir == (Path("/a/kv"), Path("/home/someone/kv"), Path("/c"))


def test_null_means_the_default_where_there_is_none_to_give():
    assert FsTierSettings.parse({"root_dir": "/a", "max_bytes": None}).max_bytes is None


def test_the_factory_may_add_keywords_and_the_user_may_not():
    user = {**TIER, "backpressure": {}}
    keywords = {"root_dir": "/nvme/kv", "max_bytes": "500GiB", "new_in_vllm": object()}
    settings, ignored = FsTierSettings.from_keywords(keywords, [user])
    assert settings.max_bytes == 500 * GIB
    assert ignored == ("new_in_vllm",)

    misspelt = {**TIER, "max_byte": 1}
    with pytest.raises(ConfigError, match=r"odirect_fs\.max_byte: .*'max_bytes'"):
        FsTierSettings.from_keywords({"root_dir": "/nvme/kv", "max_byte": 1}, [misspelt])


def test_a_key_of_another_tier_is_not_taken_for_ours():
    other = {"type": "fs", "root_dir": "/x", "new_in_vllm": 1}
    _, ignored = FsTierSettings.from_keywords(
        {"root_dir": "/nvme/kv", "new_in_vllm": 1}, [TIER, other]
    )
    assert ignored == ("new_in_vllm",)


def test_settings_are_frozen():
    settings = FsTierSettings.parse(TIER)
    with pytest.raises(ValueError, match="frozen"):
        settings.max_bytes = 1


def test_importing_needs_no_vllm_and_no_torch():
    code = (
        "import sys, vllm_tiered_offload.config, vllm_tiered_offload.spec.sizing;"
        "sys.exit(any(m in sys.modules for m in ('vllm', 'torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestRootDirs:
    """Looking at directories before memory is taken, without touching them."""

    def test_a_root_yet_to_be_made(self, tmp_path):
        root = tmp_path / "a" / "b"
        FsTierSettings.parse({"root_dir": str(root)}).check_root_dirs()
        assert not (tmp_path / "a").exists()

    def test_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        tier = FsTierSettings.parse({"root_dir": str(tmp_path / "file")})
        with pytest.raises(ConfigError, match=r"root_dir: .*is not a directory \(ENOTDIR\)"):
            tier.check_root_dirs()

    def test_below_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        tier = FsTierSettings.parse({"root_dir": str(tmp_path / "file" / "kv")})
        with pytest.raises(ConfigError, match=r"cannot be made in .*file', which is not a dir"):
            tier.check_root_dirs()

    def test_a_dangling_link(self, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        tier = FsTierSettings.parse({"root_dir": str(tmp_path / "link")})
        with pytest.raises(ConfigError, match="is not a directory"):
            tier.check_root_dirs()

    def test_not_writable(self, tmp_path):
        tier = FsTierSettings.parse({"root_dir": str(tmp_path)})
        with pytest.raises(ConfigError, match=r"is not writable for uid \d+ \(EACCES\)"):
            tier.check_root_dirs(access=lambda path, mode: not mode & 2)

    def test_a_read_only_mount(self, tmp_path):
        tier = FsTierSettings.parse({"root_dir": str(tmp_path)})
        mounted = SimpleNamespace(f_flag=os.ST_RDONLY, f_blocks=1)
        with pytest.raises(ConfigError, match=r"mounted read-only \(EROFS\); .*mode to 'read'"):
            tier.check_root_dirs(access=lambda *_: False, statvfs=lambda _: mounted)

    @pytest.mark.parametrize("place", ["/proc", "/sys"])
    def test_a_file_system_that_keeps_no_files(self, place):
        tier = FsTierSettings.parse({"root_dir": f"{place}/kv"})
        with pytest.raises(ConfigError, match=r"root_dir: .*give a directory on a disk"):
            tier.check_root_dirs(access=lambda *_: True)

    def test_one_that_hides_its_size(self, tmp_path):
        hiding = SimpleNamespace(f_flag=0, f_blocks=0)
        FsTierSettings.parse({"root_dir": str(tmp_path)}).check_root_dirs(
            statvfs=lambda _: hiding
        )

    def test_every_root_is_told(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).touch()
        roots = [str(tmp_path / name) for name in ("a", "b", "c")]
        problems = FsTierSettings.parse({"root_dir": roots}).root_problems()
        assert [error.key for error in problems] == ["odirect_fs.root_dir"] * 2

    def test_reading_needs_no_write_permission(self, tmp_path):
        tier = FsTierSettings.parse({"root_dir": str(tmp_path), "mode": "read"})
        tier.check_root_dirs(access=lambda path, mode: not mode & 2)

    def test_reading_what_is_not_there(self, tmp_path):
        tier = FsTierSettings.parse({"root_dir": str(tmp_path / "no"), "mode": "read"})
        with pytest.raises(ConfigError, match=r"does not exist \(ENOENT\)"):
            tier.check_root_dirs()

    def test_the_spec_names_the_tier(self, tmp_path):
        (tmp_path / "file").touch()
        tiers = [{"type": "fs"}, {"type": "odirect_fs", "root_dir": str(tmp_path / "file")}]
        settings = SpecSettings.parse(
            {"cpu_bytes_to_use": 1, "secondary_tiers": tiers}, tiering=True
        )
        with pytest.raises(ConfigError, match=r"secondary_tiers\[1\]\.root_dir"):
            settings.check_root_dirs()
