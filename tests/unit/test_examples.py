# SPDX-License-Identifier: Apache-2.0
"""The launch scripts pass a configuration that our own checks accept."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_offload.config import SpecSettings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ARGUMENTS = {
    "serve_cpu.sh": ["model", "DIR", "--seed=1"],
    "serve_gpu.sh": ["model", "DIR", "--seed=1"],
    "serve_tp.sh": ["model", "DIR", "4", "--seed=1"],
    "serve_dp.sh": ["model", "DIR", "2", "--seed=1"],
    "serve_several_disks.sh": ["model", "DIR", "DIR-2"],
    "serve_shared_dir.sh": ["model", "DIR", "--seed=1"],
    "serve_connector_name.sh": ["model", "DIR", "--seed=1"],
    "serve_stock_spec.sh": ["model", "DIR", "my-weights-1", "--seed=1"],
    "serve_with_p2p.sh": ["model", "DIR", "--seed=1"],
}


def launched(script: str, scratch: Path) -> list[str]:
    """The arguments with which the script would start vLLM."""
    fake = scratch / "bin"
    fake.mkdir()
    for name in ("vllm", "python3"):
        (fake / name).write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
        (fake / name).chmod(0o755)
    arguments = [a.replace("DIR", str(scratch / "kv")) for a in ARGUMENTS[script]]
    env = {**os.environ, "PATH": f"{fake}:{os.environ['PATH']}"}
    env["P2P_CONFIG"] = '{"type": "p2p"}'
    done = subprocess.run(
        [str(EXAMPLES / script), *arguments],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split("\0")


def test_every_launch_script_is_tested() -> None:
    assert {p.name for p in EXAMPLES.glob("serve_*.sh")} == set(ARGUMENTS)


@pytest.mark.parametrize("script", sorted(ARGUMENTS))
def test_configuration(script: str, tmp_path: Path) -> None:
    words = launched(script, tmp_path)
    assert "model" in words
    config: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_role"] == "kv_both"
    settings = SpecSettings.parse(config["kv_connector_extra_config"], tiering=True)
    (tier,) = settings.fs_tiers()
    assert tier.max_bytes
