# SPDX-License-Identifier: Apache-2.0
"""The matrix script: what it refuses before it sets anything up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "vllm_matrix.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, check=False, timeout=20
    )


@pytest.mark.parametrize("arguments", [["-h"], ["0.32.0", "--help"]])
def test_help_sets_nothing_up(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert "Usage: scripts/vllm_matrix.sh [VERSION...]" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("argument", ["--verbose", "newest", "0.32"])
def test_what_is_no_version_is_one_line(argument: str) -> None:
    done = run("0.32.0", argument)
    assert done.returncode == 2
    assert done.stderr.startswith(f"vllm_matrix: {argument} is not a version")
    assert done.stderr.count("\n") == 1
