# SPDX-License-Identifier: Apache-2.0
"""The doctor command: what it reads, what it prints, how it exits."""

import json

import pytest
from typer.testing import CliRunner

from vllm_tiered_offload.cli import doctor as doctor_module
from vllm_tiered_offload.cli.checks import Check
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
            "spec_name": "AlignedTieringOffloadingSpec",
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
    (check,) = report["configuration"]
    assert check["level"] == ("warn" if form == "inner" else "ok")
    assert str(tmp_path / "kv") in report


def test_every_bad_key_is_a_failed_check(tmp_path):
    config = {**whole(tmp_path, max_byte=1, patience="long"), "kv_role": "both"}
    result = doctor("--config", json.dumps(config), "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    checks = report["configuration"]
    assert [check["name"] for check in checks] == [
        "kv_role",
        "kv_connector_extra_config.max_byte",
        "kv_connector_extra_config.patience",
    ]
    assert {check["level"] for check in checks} == {"fail"}
    assert checks[0]["advice"] == "did you mean 'kv_both'?"
    assert "long" in checks[2]["found"]
    # What can be looked at all the same is.
    assert str(tmp_path / "kv") in report


def test_bad_keys_in_words(tmp_path):
    config = json.dumps(whole(tmp_path, spec_name="AlignedTieringSpec", store_hedroom=1))
    output = doctor("--config", config).output
    assert "fail  kv_connector_extra_config.spec_name: 'AlignedTieringSpec'" in output
    assert "-> did you mean 'store_headroom'?" in output
    assert "2 fail" in output


def test_a_doubt_is_a_warning_and_no_failure(tmp_path):
    config = json.dumps(whole(tmp_path, secondary_tiers=[]))
    result = doctor("--config", config, "--json")
    assert result.exit_code == 0
    (check,) = json.loads(result.output)["configuration"]
    assert (check["level"], check["name"]) == (
        "warn",
        "kv_connector_extra_config.secondary_tiers",
    )


def test_directories_by_position_by_name_and_from_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = json.dumps(whole(tmp_path))
    result = doctor("a", str(tmp_path / "b"), "-r", "c", "--config", config, "--json")
    report = json.loads(result.output)
    assert all(str(tmp_path / name) in report for name in ("a", "b", "c", "kv"))


def test_a_directory_named_twice_is_looked_at_as_the_configuration_says(tmp_path):
    tiers = [{"type": "odirect_fs", "root_dir": str(tmp_path), "max_bytes": "900TiB"}]
    config = json.dumps(whole(tmp_path, secondary_tiers=tiers))
    result = doctor(str(tmp_path), "--config", config, "--json")
    checks = json.loads(result.output)[str(tmp_path)]
    assert sum(check["name"] == "directory" for check in checks) == 1
    assert "max_bytes is 900 TiB" in str(checks)


def test_advice_keeps_its_commands_on_one_line_of_a_narrow_terminal(tmp_path, monkeypatch):
    command = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    check = Check("huge pages", "warn", "none for the pool", f"{command} (is never)")
    monkeypatch.setattr(doctor_module, "check_memory", lambda *_: iter([check]))
    result = CliRunner().invoke(app, ["doctor", "--seconds", "0"], env={"COLUMNS": "80"})
    assert any(command in line for line in result.output.splitlines())
    assert max(map(len, result.output.splitlines())) <= 80


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
