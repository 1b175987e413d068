# SPDX-License-Identifier: Apache-2.0
"""What the README says that can be checked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_table_of_keys_is_generated_from_the_settings() -> None:
    command = [sys.executable, "scripts/config_table.py", "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_link_inside_the_repository_leads_somewhere() -> None:
    for page in (*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
