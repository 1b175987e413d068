# SPDX-License-Identifier: Apache-2.0
"""A whole --kv-transfer-config: every bad key is found at once, each with what is right."""

from typing import Any

import pytest

from vllm_tiered_offload.config import Transfer, read_transfer

EXTRA = "kv_connector_extra_config."
TIER = {"type": "odirect_fs", "root_dir": "/nvme/kv"}
POOL = {
    "spec_name": "AlignedTieringOffloadingSpec",
    "cpu_bytes_to_use": "1GiB",
    "secondary_tiers": [TIER],
}
WHOLE = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": POOL,
}


def without(document: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}


def whole(**extra: Any) -> dict[str, Any]:
    return {**WHOLE, "kv_connector_extra_config": {**POOL, **extra}}


def lines(document: dict[str, Any]) -> tuple[list[str], list[str]]:
    found = read_transfer(document)
    return [str(error) for error in found.problems], [str(error) for error in found.doubts]


def one(found: list[str], key: str, right: str) -> None:
    (line,) = found
    assert line.startswith(f"{key}: ")
    assert right in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "document",
    [
        WHOLE,
        {"kv_transfer_config": WHOLE},
        {"kv-transfer-config": WHOLE},
        {**WHOLE, "kv_connector": "TieredOffloadingConnector"},
        {
            **WHOLE,
            "kv_connector": "TieredOffloadingConnector",
            "kv_connector_extra_config": without(POOL, "spec_name"),
        },
        {
            **WHOLE,
            "kv_connector": "TieredOffloadingConnector",
            "kv_connector_module_path": "vllm_tiered_offload.connector",
            "kv_load_failure_policy": "recompute",
        },
        whole(spec_module_path="vllm_tiered_offload.spec.tiering"),
        whole(secondary_tiers=[TIER, {"type": "fs", "root_dir": "/mnt"}, {"type": "p2p"}]),
        {
            **WHOLE,
            "kv_connector_extra_config": {
                "spec_name": "AlignedCPUOffloadingSpec",
                "cpu_bytes_to_use": "1GiB",
            },
        },
        whole(
            spec_name="TieringOffloadingSpec",
            cpu_bytes_to_use=1 << 30,
            secondary_tiers=[{**TIER, "cache_namespace": "mine"}],
        ),
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [WHOLE, {"kv_connector": "Other"}]},
        },
    ],
)
def test_nothing_to_say(document):
    assert lines(document) == ([], [])


@pytest.mark.parametrize(
    ("document", "key", "right"),
    [
        (without(WHOLE, "kv_connector"), "kv_connector", "'OffloadingConnector'"),
        (without(WHOLE, "kv_role"), "kv_role", "'kv_both'"),
        ({**WHOLE, "kv_role": "both"}, "kv_role", "did you mean 'kv_both'"),
        ({**WHOLE, "kv_role": "x"}, "kv_role", "kv_both, kv_producer"),
        ({**WHOLE, "kv_rool": "kv_both"}, "kv_rool", "did you mean 'kv_role'"),
        (
            {**WHOLE, "kv_connector": "OffloadConnector"},
            "kv_connector",
            "did you mean 'OffloadingConnector'",
        ),
        ({**WHOLE, "kv_connector": 5}, "kv_connector", "TieredOffloadingConnector"),
        (
            {**WHOLE, "kv_connector_module_path": "vllm_tiered_offload.connector"},
            "kv_connector_module_path",
            "'TieredOffloadingConnector'",
        ),
        (without(WHOLE, "kv_connector_extra_config"), EXTRA[:-1], "is missing"),
        ({**WHOLE, "kv_connector_extra_config": []}, EXTRA[:-1], "is not an object"),
        (
            {
                **without(WHOLE, "kv_connector_extra_config"),
                "kv_connector_extra_confg": POOL,
            },
            "kv_connector_extra_confg",
            "did you mean 'kv_connector_extra_config'",
        ),
        (
            whole(spec_name="AlignedTieringOffloadSpec"),
            f"{EXTRA}spec_name",
            "did you mean 'AlignedTieringOffloadingSpec'",
        ),
        (whole(spec_name="zzz"), f"{EXTRA}spec_name", "AlignedCPUOffloadingSpec"),
        (whole(spec_name=[1]), f"{EXTRA}spec_name", "known specs"),
        (
            {**WHOLE, "kv_connector_extra_config": without(POOL, "spec_name")},
            f"{EXTRA}spec_name",
            "'AlignedTieringOffloadingSpec'",
        ),
        (
            whole(spec_module_path="vllm_tiered_offload.spec.cpu"),
            f"{EXTRA}spec_module_path",
            "must be 'vllm_tiered_offload.spec.tiering'",
        ),
        (whole(spec_module_path="/a.py"), f"{EXTRA}spec_module_path", "'package.module'"),
        (
            whole(secondary_tiers=[{**TIER, "root_dir": "kv"}]),
            f"{EXTRA}secondary_tiers[0].root_dir",
            "is not absolute",
        ),
        (
            whole(secondary_tiers=[{"type": "fs"}]),
            f"{EXTRA}secondary_tiers[0].root_dir",
            "is missing",
        ),
        (
            whole(
                secondary_tiers=[
                    {
                        **TIER,
                        "type": "ODirectFsTier",
                        "module_path": "vllm_tiered_offload.fs_tier.manger",
                    }
                ]
            ),
            f"{EXTRA}secondary_tiers[0].module_path",
            "'vllm_tiered_offload.fs_tier.manager'",
        ),
        (
            whole(spec_name="TieringOffloadingSpec", secondary_tiers=[]),
            f"{EXTRA}cpu_bytes_to_use",
            "give bytes as a number",
        ),
        (
            whole(
                spec_name="TieringOffloadingSpec",
                cpu_bytes_to_use=5,
                secondary_tiers=[],
                prefault=False,
            ),
            f"{EXTRA}prefault",
            "needs spec_name 'AlignedTieringOffloadingSpec'",
        ),
        (
            whole(spec_name="CPUOffloadingSpec", cpu_bytes_to_use=5),
            f"{EXTRA}secondary_tiers",
            "AlignedTieringOffloadingSpec",
        ),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [whole(pin_share=3)]},
            },
            f"connectors[0].{EXTRA}pin_share",
            "0.01 to 1",
        ),
        (
            {**WHOLE, "kv_connector": "MultiConnector"},
            f"{EXTRA}connectors",
            "a list of connectors",
        ),
    ],
)
def test_a_problem(document, key, right):
    problems, doubts = lines(document)
    one(problems, key, right)
    assert doubts == []


@pytest.mark.parametrize(
    ("document", "key", "right"),
    [
        (whole(secondary_tiers=[]), f"{EXTRA}secondary_tiers", "AlignedCPUOffloadingSpec"),
        (
            {**WHOLE, "kv_connector_extra_config": without(POOL, "secondary_tiers")},
            f"{EXTRA}secondary_tiers",
            "add a tier",
        ),
        (POOL, "kv_connector", "give the object that holds"),
        ({**WHOLE, "kv_rank": 0}, "kv_rank", "leave it out"),
        (
            whole(secondary_tiers=[{"type": "fs", "root_dir": "kv"}]),
            f"{EXTRA}secondary_tiers[0].root_dir",
            "give an absolute path",
        ),
        (
            whole(secondary_tiers=[TIER, {"type": "objj"}]),
            f"{EXTRA}secondary_tiers[1].type",
            "did you mean 'obj'",
        ),
        (
            whole(secondary_tiers=[TIER, {"type": "A", "module_path": "nothing_here.a"}]),
            f"{EXTRA}secondary_tiers[1].module_path",
            "not installed here",
        ),
        (
            whole(spec_name="Mine", spec_module_path="nothing_here.spec"),
            f"{EXTRA}spec_module_path",
            "not installed here",
        ),
        (
            whole(spec_name="TieringOffloadingSpec", cpu_bytes_to_use=5),
            f"{EXTRA}secondary_tiers[0].cache_namespace",
            "name the model",
        ),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}]},
            },
            f"{EXTRA}connectors",
            "OffloadingConnector",
        ),
    ],
)
def test_a_doubt(document, key, right):
    problems, doubts = lines(document)
    assert problems == []
    one(doubts, key, right)


def test_all_of_them_at_once():
    document = {
        "kv_conector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "AlignedTieringSpec",
            "cpu_byte_to_use": "1GiB",
            "pin_share": 3,
            "prefault": "yes",
            "blocks_per_chunk": 0,
            "secondary_tiers": [
                {"type": "odirect_fs", "root_dir": "kv", "max_byte": 1},
                {"type": "odirectfs"},
                {},
            ],
        },
    }
    problems, _ = lines(document)
    assert [line.partition(": ")[0].removeprefix(EXTRA) for line in problems] == [
        "kv_conector",
        "kv_role",
        "spec_name",
        "cpu_byte_to_use",
        "prefault",
        "pin_share",
        "blocks_per_chunk",
        "secondary_tiers[0].max_byte",
        "secondary_tiers[0].root_dir",
        "secondary_tiers[1].type",
        "secondary_tiers[2].type",
    ]


def test_what_is_good_is_still_read():
    found = read_transfer(whole(max_byte=1, secondary_tiers=[TIER, {**TIER, "mode": "rw"}]))
    assert isinstance(found, Transfer)
    assert found.settings is not None
    assert found.settings.cpu_bytes_to_use == 1 << 30
    assert [str(tier.root_dir[0]) for tier in found.tiers] == ["/nvme/kv"]


def test_a_connector_of_somebody_else_knows_its_own_keys():
    document = {
        "kv_connector": "Mine",
        "kv_role": "kv_both",
        "kv_connector_module_path": "pytest.mine",
        "kv_connector_extra_config": {"anything": 1},
    }
    assert lines(document) == ([], [])


def test_the_right_key_counts_where_a_misspelt_one_stands_beside_it():
    problems, _ = lines({**WHOLE, "kv_rolle": "x"})
    one(problems, "kv_rolle", "did you mean 'kv_role'")


def test_with_the_size_on_the_command_line():
    extra = without(POOL, "cpu_bytes_to_use")
    found = read_transfer({"kv_connector_extra_config": extra}, kv_offloading_size=4)
    assert (found.problems, found.doubts) == ([], [])
    assert found.settings is not None
    assert found.settings.cpu_bytes_to_use == 4 << 30
    # vLLM puts its own connector in the place of ours then, which has another default.
    tiered = {**WHOLE, "kv_connector": "TieredOffloadingConnector"}
    tiered["kv_connector_extra_config"] = without(extra, "spec_name")
    (problem,) = read_transfer(tiered, kv_offloading_size=4).problems
    assert problem.key == f"{EXTRA}spec_name"
