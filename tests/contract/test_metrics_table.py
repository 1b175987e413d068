# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md comes from the definitions, and a stale page is noticed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from tests.support.series import series
from vllm_tiered_offload import pool_metrics
from vllm_tiered_offload.fs_tier import metrics as tier_metrics

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "metrics.md"


@pytest.fixture
def script() -> ModuleType:
    path = REPOSITORY / "scripts" / "metrics_table.py"
    spec = importlib.util.spec_from_file_location("metrics_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr(sys, "argv", ["metrics_table.py", option])
    script.main()


def test_the_page_is_up_to_date(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run(script, monkeypatch, "--check")


def test_every_metric_has_one_whole_row(script: ModuleType) -> None:
    rows = [line for line in script.tables().splitlines() if line.startswith("| `vllm:")]
    ours = {**pool_metrics.metric_definitions(), **tier_metrics.metric_definitions()}
    names = [row.split("`")[1] for row in rows]
    assert [name.removesuffix("_total") for name in names] == list(ours)
    assert all(row.count("|") == 7 for row in rows)
    assert set(names) <= set(series())


def test_a_stale_page_is_noticed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "metrics.md"
    page.write_text(f"# Title\n{script.BEGIN}\nold\n{script.END}\nend\n")
    monkeypatch.setattr(script, "PAGE", page)
    with pytest.raises(SystemExit, match="stale"):
        run(script, monkeypatch, "--check")
    run(script, monkeypatch, "--write")
    run(script, monkeypatch, "--check")
    assert page.read_text().startswith("# Title\n")
    assert page.read_text().endswith("end\n")


def test_a_metric_without_advice_is_an_error(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(script.TIER, "stalled")
    with pytest.raises(SystemExit, match="stalled"):
        script.tables()


@pytest.mark.skipif(
    not hasattr(TieringOffloadingMetrics, "BACKPRESSURE_BLOCKS_DROPPED"),
    reason="the page names series of vLLM 0.31 and later",
)
def test_every_metric_named_in_the_page_exists() -> None:
    named = set(re.findall(r"vllm:\w*\w", PAGE.read_text()))
    known = set(series())
    for name in named:
        assert name in known or any(other.startswith(f"{name}_") for other in known), name
