# SPDX-License-Identifier: Apache-2.0
"""The doctor command: what it reads, what it prints, how it exits."""

import json

import pytest
from typer.testing import CliRunner

from vllm_tiered_offload.cli.main import app


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", "--seconds", "0", *arguments])


def test_a_report_in_words(tmp_path):
    tmp_path.chmod(0o700)
    result = doctor("--root-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    for title in ("machine", "memory", "vLLM", "direct I/O", " ok, "):
        assert title in result.output


def test_a_failed_check_is_exit_code_1(tmp_path):
    (tmp_path / "file").touch()
    result = doctor("--root-dir", str(tmp_path / "file"), "--json")
    assert result.exit_code == 1
    (check, *_) = json.loads(result.output)[str(tmp_path / "file")]
    assert check["level"] == "fail"
    assert check["advice"]


def whole(tmp_path, **extra):
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": "1MiB",
            "secondary_tiers": [{"type": "odirect_fs", "root_dir": str(tmp_path / "kv")}],
            **extra,
        },
    }


@pytest.mark.parametrize("form", ["text", "file", "inner"])
def test_a_configuration_brings_its_directories(tmp_path, form):
    document = whole(tmp_path)
    if form == "inner":
        document = document["kv_connector_extra_config"]
    text = json.dumps(document)
    if form == "file":
        (tmp_path / "config.json").write_text(text)
        text = str(tmp_path / "config.json")
    result = doctor("--config", text, "--json")
    report = json.loads(result.output)
    assert report["configuration"][0]["level"] == "ok"
    assert str(tmp_path / "kv") in report


def test_a_bad_key_is_a_failed_check(tmp_path):
    result = doctor("--config", json.dumps(whole(tmp_path, max_byte=1)), "--json")
    assert result.exit_code == 1
    (check,) = json.loads(result.output)["configuration"]
    assert "max_byte" in check["found"]


def test_a_pool_larger_than_the_machine(tmp_path):
    config = json.dumps(whole(tmp_path, cpu_bytes_to_use="1EiB"))
    result = doctor("--config", config, "--json")
    assert result.exit_code == 1
    (*_, pool) = json.loads(result.output)["memory"]
    assert (pool["name"], pool["level"]) == ("CPU pool", "fail")


@pytest.mark.parametrize("text", ["{", "[1]", "/no/such/file", '{"a"'])
def test_not_a_configuration(text):
    result = doctor("--config", text)
    assert result.exit_code == 2
    assert "--config" in result.stderr
