# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts ask for series that exist, with labels they carry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.series import series
from vllm_tiered_offload import pool_metrics
from vllm_tiered_offload.fs_tier.metrics import PREFIX, metric_definitions

EXAMPLES = Path(__file__).parents[2] / "examples"
DASHBOARD = EXAMPLES / "grafana" / "dashboards" / "vllm-tiered-offload.json"
ALERTS = EXAMPLES / "prometheus" / "alerts.yml"


def panels() -> Iterator[tuple[str, str, str]]:
    """Title, query and legend of every target."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def names_in(query: str) -> list[str]:
    return re.findall(r"vllm:\w+", query)


def labels_in(query: str) -> set[str]:
    selectors = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    grouped = ",".join(re.findall(r"by \(([^)]*)\)", query))
    return {*selectors, *(part.strip() for part in grouped.split(",") if part.strip())}


QUERIES = [
    *(pytest.param(query, id=title) for title, query, _ in panels()),
    *(pytest.param(rule["expr"], id=rule["alert"]) for rule in alerts()),
]


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_names_series_that_exist_and_labels_they_carry(query: str) -> None:
    known = series()
    names = names_in(query)
    assert names
    for name in names:
        assert name in known, f"no such series: {name}"
        assert labels_in(query) <= known[name], f"{name} has no {labels_in(query)}"


@pytest.mark.parametrize("query", QUERIES)
def test_counters_are_rated_and_gauges_are_not(query: str) -> None:
    for match in re.finditer(r"(\w+)\s*\(\s*(vllm:\w+)", query):
        function, name = match.groups()
        rated = function in ("rate", "increase")
        assert rated == name.endswith(("_total", "_bucket")), f"{function}({name})"
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing)


def test_legends_use_only_labels_that_the_query_keeps() -> None:
    for title, query, legend in panels():
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels_in(query), title


def test_alert_texts_use_only_labels_that_the_query_keeps() -> None:
    for rule in alerts():
        text = " ".join(rule["annotations"].values())
        used = set(re.findall(r"\$labels\.(\w+)", text))
        assert used <= labels_in(rule["expr"]), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_every_series_of_ours_is_on_the_dashboard() -> None:
    shown = {
        name.removesuffix("_total") for _, query, _ in panels() for name in names_in(query)
    }
    # Chunks and bytes tell the same story, the dashboard shows bytes.
    expected = {*metric_definitions(), *pool_metrics.metric_definitions()}
    expected -= {PREFIX + "stored_chunks", PREFIX + "loaded_chunks"}
    expected -= {pool_metrics.PREFIX + "pinned_chunks"}
    assert expected <= shown


def test_panels_do_not_overlap_and_ids_are_unique() -> None:
    all_panels = json.loads(DASHBOARD.read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in all_panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)


def test_the_compose_file_mounts_what_exists() -> None:
    compose = EXAMPLES / "grafana" / "docker-compose.yml"
    services = yaml.safe_load(compose.read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (compose.parent / source).exists(), source
    config = yaml.safe_load((EXAMPLES / "prometheus" / "prometheus.yml").read_text())
    assert config["rule_files"] == [ALERTS.name]
    provider = yaml.safe_load(
        (EXAMPLES / "grafana/provisioning/dashboards/dashboards.yml").read_text()
    )["providers"][0]
    assert f"./dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
