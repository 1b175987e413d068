# SPDX-License-Identifier: Apache-2.0
"""The README's tables come from the settings, and a stale README is noticed."""

import importlib.util
import sys
from pathlib import Path

import pytest

from vllm_tiered_offload.config import FsTierSettings, SpecSettings

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "config_table.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("config_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_is_in_the_tables(script):
    tables = script.tables()
    for settings in (SpecSettings, FsTierSettings):
        for name, field in settings.model_fields.items():
            assert f"| `{name}` |" in tables
            assert field.description in tables


def test_every_row_has_its_columns(script):
    for line in script.tables().splitlines():
        if line.startswith("| `"):
            assert line.replace("\\|", "").count("|") in (3, 6), line


def test_check_notices_a_stale_table(script, tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n{script.BEGIN}\nold\n{script.END}\nend\n")
    monkeypatch.setattr(script, "README", readme)

    monkeypatch.setattr(sys, "argv", ["config_table.py", "--check"])
    with pytest.raises(SystemExit, match="stale"):
        script.main()
    monkeypatch.setattr(sys, "argv", ["config_table.py", "--write"])
    script.main()
    monkeypatch.setattr(sys, "argv", ["config_table.py", "--check"])
    script.main()
    text = readme.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("end\n")


def test_a_readme_without_markers(script, tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text("nothing here")
    monkeypatch.setattr(script, "README", readme)
    monkeypatch.setattr(sys, "argv", ["config_table.py", "--check"])
    with pytest.raises(SystemExit, match="no markers"):
        script.main()
