# SPDX-License-Identifier: Apache-2.0
"""The launch scripts: what they pass to vLLM, their help, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_offload.config import FsTierSettings, SpecSettings

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
# What a script wants before vLLM's own arguments; DIR stands for a directory.
ARGUMENTS = {
    "serve_cpu.sh": ["model", "DIR"],
    "serve_gpu.sh": ["model", "DIR"],
    "serve_tp.sh": ["model", "DIR", "4"],
    "serve_dp.sh": ["model", "DIR", "2"],
    "serve_several_disks.sh": ["model", "DIR", "DIR-2"],
    "serve_shared_dir.sh": ["model", "DIR"],
    "serve_connector_name.sh": ["model", "DIR"],
    "serve_stock_spec.sh": ["model", "DIR", "my-weights-1"],
    "serve_with_p2p.sh": ["model", "DIR"],
}
OPTIONAL = {"serve_cpu.sh": 1}  # of the last of them
P2P = {"P2P_CONFIG": '{"type": "p2p"}'}
scripts = pytest.mark.parametrize("script", sorted(ARGUMENTS))


@dataclass(frozen=True)
class Launch:
    """What came of a script; `words` are vLLM's arguments, empty where it was not started."""

    code: int
    words: list[str]
    stdout: str
    stderr: str

    @property
    def settings(self) -> SpecSettings:
        config: dict[str, Any] = json.loads(self.after("--kv-transfer-config"))
        assert config["kv_role"] == "kv_both"
        return SpecSettings.parse(config["kv_connector_extra_config"], tiering=True)

    @property
    def tier(self) -> FsTierSettings:
        (tier,) = self.settings.fs_tiers()
        return tier

    def after(self, option: str) -> str:
        return self.words[self.words.index(option) + 1]


class Launcher:
    """Runs a copy of a script, alone in its folder, with a `vllm` that notes its arguments."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._noted = scratch / "arguments"
        self._path = scratch / "bin"
        self._path.mkdir()
        for name in ("vllm", "python3"):
            stub = self._path / name
            stub.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" >{self._noted}\n')
            stub.chmod(0o755)

    def __call__(
        self,
        script: str,
        *arguments: str,
        env: Mapping[str, str] = P2P,
        cwd: Path | None = None,
    ) -> Launch:
        self._noted.unlink(missing_ok=True)
        copy = shutil.copy(EXAMPLES / script, self.scratch / script)
        done = subprocess.run(
            [copy, *(word.replace("DIR", str(self.scratch / "kv")) for word in arguments)],
            env={
                "PATH": f"{self._path}:{os.environ['PATH']}",
                "HOME": str(self.scratch / "home"),
                **env,
            },
            cwd=cwd or self.scratch,
            check=False,
            capture_output=True,
            text=True,
        )
        noted = self._noted.read_text() if self._noted.exists() else ""
        return Launch(done.returncode, noted.split("\0")[:-1], done.stdout, done.stderr)


@pytest.fixture
def launch(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def test_every_launch_script_is_tested() -> None:
    assert {p.name for p in EXAMPLES.glob("serve_*.sh")} == set(ARGUMENTS)


@scripts
def test_it_passes_a_configuration_and_more_arguments(
    script: str, launch: Launcher, tmp_path: Path
) -> None:
    started = launch(script, *ARGUMENTS[script], "--port", "9000", "--seed=1")
    assert started.code == 0, started.stderr
    assert "model" in started.words
    assert started.after("--port") == "9000"
    assert "--seed=1" in started.words
    assert started.tier.max_bytes
    directories = [str(path) for path in started.tier.root_dir]
    assert directories == [
        word.replace("DIR", str(tmp_path / "kv"))
        for word in ARGUMENTS[script]
        if word.startswith("DIR")
    ]


@scripts
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(script: str, option: str, launch: Launcher) -> None:
    asked = launch(script, option, env={})
    assert (asked.code, asked.words, asked.stderr) == (0, [], "")
    first = asked.stdout.splitlines()[0]
    assert first.startswith("usage: ")
    assert f"{script} MODEL " in first
    assert first.endswith("[vllm arguments]")
    assert "#" not in asked.stdout
    # Whatever the script takes from the environment is in its help.
    read = set(re.findall(r"\$\{([A-Z][A-Z_0-9]*)", (EXAMPLES / script).read_text()))
    assert read
    assert all(name in asked.stdout for name in read), read


@scripts
def test_missing_arguments_are_one_line(script: str, launch: Launcher) -> None:
    wanted = ARGUMENTS[script]
    for given in range(len(wanted) - OPTIONAL.get(script, 0)):
        if script == "serve_several_disks.sh" and given == 2:
            continue  # one disk is enough
        for rest in ([], ["--port", "9000"]):
            refused = launch(script, *wanted[:given], *rest)
            assert (refused.code, refused.words) == (2, []), (given, rest)
            (line,) = refused.stderr.splitlines()
            assert line.startswith(f"{script}: ")
            assert "--help" in line


@scripts
def test_a_file_is_no_directory(script: str, launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    refused = launch(script, *ARGUMENTS[script])
    assert (refused.code, refused.words) == (2, [])
    (line,) = refused.stderr.splitlines()
    assert f"{tmp_path}/kv is not a directory" in line


@scripts
def test_a_relative_directory_with_a_space(
    script: str, launch: Launcher, tmp_path: Path
) -> None:
    words = [word.replace("DIR", "my kv") for word in ARGUMENTS[script]]
    assert launch(script, *words).tier.root_dir[0] == tmp_path / "my kv"


@scripts
def test_sizes_come_from_the_environment(script: str, launch: Launcher) -> None:
    sizes = {"KV_CPU": "3GiB", "KV_CPU_BYTES": str(3 << 30), "KV_DISK": "7GiB", **P2P}
    started = launch(script, *ARGUMENTS[script], env=sizes)
    assert started.settings.cpu_bytes_to_use == 3 << 30
    assert started.tier.max_bytes == 7 << 30


@pytest.mark.parametrize(
    ("script", "arguments", "env", "words"),
    [
        ("serve_tp.sh", ["model", "DIR", "0"], {}, "TP: '0'"),
        ("serve_dp.sh", ["model", "DIR", "two"], {}, "DP: 'two'"),
        ("serve_gpu.sh", ["model", 'DIR"'], {}, "holds a quote"),
        ("serve_stock_spec.sh", ["model", "DIR", 'a"b'], {}, "NAMESPACE"),
        ("serve_shared_dir.sh", ["model", "DIR"], {"MODE": "write"}, "MODE: 'write'"),
        ("serve_with_p2p.sh", ["model", "DIR"], {}, "P2P_CONFIG"),
        ("serve_several_disks.sh", ["model", "DIR", "bin/vllm"], {}, "not a directory"),
    ],
)
def test_wrong_arguments_are_one_line(
    script: str, arguments: list[str], env: dict[str, str], words: str, launch: Launcher
) -> None:
    refused = launch(script, *arguments, env=env)
    assert (refused.code, refused.words) == (2, [])
    (line,) = refused.stderr.splitlines()
    assert words in line


def test_the_cpu_script_has_a_directory_of_its_own(launch: Launcher, tmp_path: Path) -> None:
    started = launch("serve_cpu.sh", "model", "--port", "9000")
    assert started.after("--port") == "9000"
    assert started.tier.root_dir == (tmp_path / "home/.cache/vllm-kv",)


@scripts
def test_degrees_of_parallelism(script: str, launch: Launcher) -> None:
    words = launch(script, *ARGUMENTS[script]).words
    assert ("--tensor-parallel-size" in words) == (script == "serve_tp.sh")
    assert ("--data-parallel-size" in words) == (script == "serve_dp.sh")


@pytest.mark.parametrize("script", ["examples/quickstart.sh", "scripts/setup_env.sh"])
def test_help_sets_nothing_up(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(REPOSITORY / script), "--help"],
        env={**os.environ, "VTO_ENV": str(tmp_path / "env")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("usage: ")
    assert not (tmp_path / "env").exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck() -> None:
    found = [*EXAMPLES.glob("*.sh"), *(REPOSITORY / "scripts").glob("*.sh")]
    done = subprocess.run(
        ["shellcheck", *map(str, found)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
