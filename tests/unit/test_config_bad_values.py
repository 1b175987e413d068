# SPDX-License-Identifier: Apache-2.0
"""Every bad value is refused in one line that names its key and says what is right."""

import pytest

from vllm_tiered_offload.config import ConfigError, SpecSettings

POOL = {"cpu_bytes_to_use": "1GiB"}
TIER = {"type": "odirect_fs", "root_dir": "/nvme/kv"}

# (what is typed in kv_connector_extra_config beside a good pool size, the key, the help)
BAD_SPEC = [
    ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use", "1 or more"),
    ({"cpu_bytes_to_use": -1}, "cpu_bytes_to_use", "negative"),
    ({"cpu_bytes_to_use": "-5GiB"}, "cpu_bytes_to_use", "negative"),
    ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use", "not a size"),
    ({"cpu_bytes_to_use": None}, "cpu_bytes_to_use", "not a size"),
    ({"cpu_bytes_to_use": ""}, "cpu_bytes_to_use", "'32GiB'"),
    ({"cpu_bytes_to_use": "lots"}, "cpu_bytes_to_use", "'32GiB'"),
    ({"cpu_bytes_to_use": "32G"}, "cpu_bytes_to_use", "'32GiB'"),
    ({"cpu_bytes_to_use": "32XB"}, "cpu_bytes_to_use", "not a size"),
    ({"cpu_bytes_to_use": "1e9"}, "cpu_bytes_to_use", "not a size"),
    ({"cpu_bytes_to_use": [1]}, "cpu_bytes_to_use", "not a size"),
    ({"cpu_bytes_to_use": float("nan")}, "cpu_bytes_to_use", "finite"),
    ({"cpu_bytes_to_use": float("inf")}, "cpu_bytes_to_use", "finite"),
    ({"cpu_bytes_to_use": 0.5}, "cpu_bytes_to_use", "1 or more"),
    ({"cpu_bytes_to_use": "9EiB"}, "cpu_bytes_to_use", "8 EiB"),
    ({"cpu_bytes_to_use": "9" * 5000}, "cpu_bytes_to_use", "8 EiB"),
    ({"cpu_byte_to_use": 1}, "cpu_byte_to_use", "'cpu_bytes_to_use'"),
    ({"secondary_tier": []}, "secondary_tier", "'secondary_tiers'"),
    ({"hugepages": "off"}, "hugepages", "'huge_pages'"),
    ({"zzzzzz": 1}, "zzzzzz", "known keys"),
    ({7: 1}, "7", "known keys"),
    ({"secondary_tiers": {}}, "secondary_tiers", "not a list"),
    ({"secondary_tiers": "odirect_fs"}, "secondary_tiers", "not a list"),
    ({"secondary_tiers": None}, "secondary_tiers", "not a list"),
    ({"secondary_tiers": ["/nvme/kv"]}, "secondary_tiers", "not an object"),
    ({"secondary_tiers": [{"root_dir": "/a"}]}, "secondary_tiers[0].type", "odirect_fs"),
    ({"secondary_tiers": [{"type": 5}]}, "secondary_tiers[0].type", "odirect_fs"),
    ({"secondary_tiers": [{"type": "o_direct-fs"}]}, "secondary_tiers[0].type", "odirect_fs"),
    ({"block_size_alignment": 0}, "block_size_alignment", "1 to 1GiB"),
    ({"block_size_alignment": 12288}, "block_size_alignment", "power of two"),
    ({"block_size_alignment": 512}, "block_size_alignment", "below a page"),
    ({"region_backing": "file"}, "region_backing", '"memfd", "shm"'),
    ({"huge_pages": "4MB"}, "huge_pages", '"2MB"'),
    ({"huge_pages": True}, "huge_pages", '"auto"'),
    ({"huge_pages": "2MB", "region_backing": "shm"}, "huge_pages", "memfd"),
    ({"prefault": "yes"}, "prefault", "true, false"),
    ({"prefault": 1}, "prefault", "true, false"),
    ({"region_join_timeout": 0}, "region_join_timeout", "1 to 86400"),
    ({"region_join_timeout": "600"}, "region_join_timeout", "not a number"),
    ({"pin_share": 1.5}, "pin_share", "0.01 to 1"),
    ({"store_headroom": 1}, "store_headroom", "0 to 0.9"),
    ({"pin_deadline": -1}, "pin_deadline", "0.1 to 86400"),
    ({"patience": float("nan")}, "patience", "not a number"),
    ({"patience": True}, "patience", "not a number"),
    ({"blocks_per_chunk": 2, "block_size": 32}, "block_size", "exclude"),
    ({"blocks_per_chunk": 0}, "blocks_per_chunk", "above 0"),
    ({"block_size": "many"}, "block_size", "above 0"),
    ({"block_size": float("inf")}, "block_size", "above 0"),
    ({"store_threshold": 2}, "store_threshold", "leave it out"),
    ({"backpressure": "EMABackpressureDetector"}, "backpressure", "not an object"),
]

# The same for the keys of one odirect_fs tier beside a good directory.
BAD_TIER = [
    ({"root_dir": ""}, "root_dir", "absolute"),
    ({"root_dir": "kv"}, "root_dir", "did you mean '/"),
    ({"root_dir": 5}, "root_dir", "not a path"),
    ({"root_dir": None}, "root_dir", "not a path"),
    ({"root_dir": []}, "root_dir", "at least one"),
    ({"root_dir": ["/a", 5]}, "root_dir", "not a path"),
    ({"root_dir": ["/a", "/a/"]}, "root_dir", "separate directories"),
    ({"root_dir": ["/a/b", "/a"]}, "root_dir", "separate directories"),
    ({"root_dir": "/a\x00b"}, "root_dir", "printable"),
    ({"root_dir": "/a\nb"}, "root_dir", "printable"),
    ({"rootdir": "/a"}, "rootdir", "'root_dir'"),
    ({"max_bytes": "1MiB"}, "max_bytes", "2MiB or more"),
    ({"max_bytes": "500 potatoes"}, "max_bytes", "not a size"),
    ({"max_size": 1}, "max_size", "'max_bytes'"),
    ({"min_free_bytes": -1}, "min_free_bytes", "negative"),
    ({"io_bytes": "2GiB"}, "io_bytes", "64KiB to 1GiB"),
    ({"io_bytes": 100_000}, "io_bytes", "multiple of 4096"),
    ({"n_read_threads": 0}, "n_read_threads", "1 to 64"),
    ({"n_read_threads": 2.5}, "n_read_threads", "whole number"),
    ({"n_write_threads": True}, "n_write_threads", "whole number"),
    ({"n_write_threads": 17}, "n_write_threads", "1 to 16"),
    ({"store_queue_bytes": "1MiB"}, "store_queue_bytes", "below io_bytes"),
    ({"refresh_interval": 0}, "refresh_interval", "0.05 to 3600"),
    ({"stall_timeout": "10s"}, "stall_timeout", "not a number"),
    ({"mode": "rw"}, "mode", '"read_write", "read"'),
    ({"mode": "read", "exclusive": True}, "exclusive", "mode 'read'"),
    ({"direct_io": True}, "direct_io", '"auto", "on", "off"'),
    ({"cache_namespace": ""}, "cache_namespace", "1 to 256"),
    ({"cache_namespace": 7}, "cache_namespace", "not a string"),
    ({"cache_namespace": "a\tb"}, "cache_namespace", "printable"),
    ({"on_reset": "forget"}, "on_reset", '"new_epoch", "keep"'),
    ({"lora_adapters_immutable": "false"}, "lora_adapters_immutable", "without quotes"),
    ({"enable_kv_events": None}, "enable_kv_events", "true, false"),
    ({"locality": "local"}, "locality", '"LOCAL", "REMOTE"'),
    ({"backpressure": []}, "backpressure", "not an object"),
    ({"module_path": 5}, "module_path", "not a string"),
    ({"module_path": "a.b"}, "module_path", "must be 'vllm_tiered_offload.fs_tier.manager'"),
]


def refused(extra: dict, tiering: bool = True) -> str:
    with pytest.raises(ConfigError) as error:
        SpecSettings.parse(extra, tiering=tiering)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


def check(text: str, key: str, right: str) -> None:
    name, _, problem = text.partition(": ")
    assert name == f"kv_connector_extra_config.{key}"
    assert right in problem


@pytest.mark.parametrize(("typed", "key", "right"), BAD_SPEC)
def test_spec(typed, key, right):
    check(refused({**POOL, **typed}), key, right)


@pytest.mark.parametrize(("typed", "key", "right"), BAD_TIER)
def test_tier(typed, key, right):
    extra = {**POOL, "secondary_tiers": [{"type": "fs"}, {**TIER, **typed}]}
    check(refused(extra), f"secondary_tiers[1].{key}", right)


def test_every_problem_is_found_and_the_first_one_raised():
    extra = {
        "cpu_byte_to_use": 1,
        "patience": "long",
        "secondary_tiers": [{**TIER, "mode": "x"}],
    }
    settings, problems = SpecSettings.try_parse(extra, tiering=True)
    assert settings is None
    names = ["cpu_byte_to_use", "patience", "secondary_tiers[0].mode"]
    assert [error.key for error in problems] == [
        f"kv_connector_extra_config.{n}" for n in names
    ]
    assert refused(extra) == str(problems[0])


@pytest.mark.parametrize("given", [None, [], "x", 5])
def test_not_an_object(given):
    assert refused(given).startswith("kv_connector_extra_config: ")


def test_missing_keys():
    check(refused({}), "cpu_bytes_to_use", "is missing; give 1 or more (bytes)")
    extra = {**POOL, "secondary_tiers": [{"type": "odirect_fs"}]}
    check(refused(extra), "secondary_tiers[0].root_dir", "is missing; give an absolute path")


@pytest.mark.parametrize(
    "typed", [{"secondary_tiers": []}, {"pin_share": 0.1}, {"patience": 0}]
)
def test_keys_without_use_in_the_cpu_only_spec(typed):
    (key,) = typed
    check(refused({**POOL, **typed}, tiering=False), key, "AlignedTieringOffloadingSpec")


def test_the_value_is_shown_and_shortened():
    assert "'lots'" in refused({"cpu_bytes_to_use": "lots"})
    text = refused({"cpu_bytes_to_use": "x" * 10_000})
    assert "..." in text
