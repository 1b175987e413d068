# SPDX-License-Identifier: Apache-2.0
"""A bad value stops the engine with one line that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine, EngineError, tiering

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"cpu_bytes_to_use": "4KiB"}, "cpu_bytes_to_use: 4096 bytes hold no chunk"),
        ({"cpu_byte_to_use": "1GiB"}, "did you mean 'cpu_bytes_to_use'"),
    ],
)
def test_the_engine_stops_with_the_line(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    config = tiering(tmp_path / "kv")
    config["kv_connector_extra_config"] |= change
    with pytest.raises(EngineError, match=line):
        Engine(tiny_llama, config)


def test_the_line_is_the_root_cause_with_separate_processes(
    tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "kv").write_text("a file, not a folder")
    with pytest.raises(EngineError) as caught:
        Engine(tiny_llama, tiering(tmp_path / "kv"), processes=True, log=tmp_path / "log")
    assert caught.value
    log = (tmp_path / "log").read_text().splitlines()
    (line, *_) = (x for x in log if "ConfigError: " in x)
    assert "secondary_tiers[0].root_dir: " in line
    assert "is not a directory (ENOTDIR)" in line
