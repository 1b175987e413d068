# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: what it offers, and that it needs neither vLLM nor torch."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.support.store_roots import make_root
from vllm_tiered_offload import __version__
from vllm_tiered_offload.cli.main import app
from vllm_tiered_offload.cli.output import (
    human_bytes,
    human_count,
    human_seconds,
    size_option,
)

COMMANDS = ("doctor", "plan", "ls", "du", "verify", "prune", "clear", "bench", "top")

# An entry of None in sys.modules makes the import fail as if it were not installed.
WITHOUT = (
    "import sys\n"
    "sys.modules.update(dict.fromkeys(['vllm', 'torch', 'transformers', 'matplotlib']))\n"
    "from vllm_tiered_offload.cli.main import app\n"
    "app()\n"
)


def test_every_command_has_help_and_json():
    for command in COMMANDS:
        result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"})
        assert result.exit_code == 0
        assert "--json" in result.output


def test_version_and_no_arguments():
    assert CliRunner().invoke(app, ["--version"]).output.strip() == __version__
    listed = CliRunner().invoke(app, []).output
    assert all(command in listed for command in COMMANDS)


@pytest.mark.parametrize("command", ["doctor", "ls", "du", "verify", "bench"])
def test_without_vllm_and_torch(tmp_path, command):
    make_root(tmp_path, 3)
    arguments = {
        "doctor": ["--seconds", "0", "--root-dir", str(tmp_path)],
        "bench": ["--root-dir", str(tmp_path), "--total", "1MiB", "--rounds", "1", "--no-fio"],
    }.get(command, [str(tmp_path)])
    if command == "bench":
        arguments += ["--chunk", "64KiB"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, command, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5 PiB")],
)
def test_bytes_in_words(size, text):
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1500, "1.5 k"), (999_600, "1 M"), (15_100_000, "15.1 M")],
)
def test_counts_in_words(count, text):
    assert human_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (119, "119 s"), (180, "3 min"), (7200, "2 h"), (4e5, "5 days")],
)
def test_seconds_in_words(seconds, text):
    assert human_seconds(seconds) == text


def test_a_size_option_names_itself():
    assert size_option(None, "--x") is None
    assert size_option("1KiB", "--x") == 1024
    with pytest.raises(ValueError, match="--x: 'many'"):
        size_option("many", "--x")
