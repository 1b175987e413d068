# SPDX-License-Identifier: Apache-2.0
"""The wheel, installed in an environment of its own next to an existing vLLM."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(REPOSITORY)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"vllm_tiered_offload"}
    assert "vllm_tiered_offload/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_installed_beside_a_vllm_its_entry_point_is_found(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "env"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    site = Path(
        subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    # The vLLM that is already there: this environment's packages, after its own.
    (site / "existing_vllm.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*install, "--ignore-installed", str(wheel)], check=True, capture_output=True
    )
    code = (
        "import vllm_tiered_offload, vllm.plugins as p\n"
        f"assert vllm_tiered_offload.__file__.startswith({str(environment)!r})\n"
        "p.load_general_plugins()\n"
        "from vllm.v1.kv_offload.factory import OffloadingSpecFactory as F\n"
        "print(sorted(n for n in F._registry if n.startswith('Aligned')))\n"
    )
    done = subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "AlignedCPUOffloadingSpec', 'AlignedTieringOffloadingSpec" in done.stdout
    command = [str(environment / "bin" / "vllm-tiered-offload"), "--help"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "doctor" in shown.stdout
