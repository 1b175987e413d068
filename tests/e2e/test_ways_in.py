# SPDX-License-Identifier: Apache-2.0
"""Every way a user can select the plugin, on the real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.engine import Engine, prompt, tiering
from tests.support.server import Server

pytestmark = pytest.mark.engine

PROMPT = prompt(1000, seed=4)


def served_after_reset(engine: Engine) -> None:
    cold = engine.generate([PROMPT])[0]
    assert cold.cached == 0
    assert engine.reset()
    again = engine.generate([PROMPT])[0]
    assert again.cached == 896
    assert again.tokens == cold.tokens


def test_connector_name(tiny_llama: Path, tmp_path: Path) -> None:
    config = tiering(tmp_path / "kv", connector="TieredOffloadingConnector")
    with Engine(tiny_llama, config) as engine:
        served_after_reset(engine)
        names = set(engine.metrics())
        # The front end declared our metrics, whose first values are zeros.
        assert any(name.startswith("vllm:kv_offload_odirect_") for name in names)
    assert any((tmp_path / "kv" / "segments").iterdir())


def test_module_paths_where_vllm_plugins_leaves_us_out(
    tiny_llama: Path, tmp_path: Path
) -> None:
    config = tiering(
        tmp_path / "kv",
        tier={"type": "ODirectFsTier", "module_path": "vllm_tiered_offload.fs_tier.manager"},
        spec_module_path="vllm_tiered_offload.spec.tiering",
    )
    with Engine(tiny_llama, config, env={"VLLM_PLUGINS": "another"}) as engine:
        served_after_reset(engine)
    assert any((tmp_path / "kv" / "segments").iterdir())


def test_vllms_own_tier_in_our_spec(tiny_llama: Path, tmp_path: Path) -> None:
    tier = {"type": "fs", "max_bytes": None, "n_read_threads": 1, "n_write_threads": 1}
    config = tiering(tmp_path / "theirs", tier=tier)
    del config["kv_connector_extra_config"]["secondary_tiers"][0]["max_bytes"]
    with Engine(tiny_llama, config) as engine:
        served_after_reset(engine)
    assert list((tmp_path / "theirs").rglob("*.bin"))


def test_a_server_with_two_front_ends_and_kv_offloading_size(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Also the flag that rewrites the connector's name, and a graceful stop and restart."""
    config = tiering(tmp_path / "kv")
    del config["kv_connector_extra_config"]["cpu_bytes_to_use"]
    arguments = ["--api-server-count", "2", "--kv-transfer-config", json.dumps(config)]
    arguments += ["--kv-offloading-size", "0.25"]
    with Server(tiny_llama, arguments, scratch=tmp_path) as server:
        first = server.complete(PROMPT)
        assert "worker 0 of 1" in server.log
        assert f"of {2**28} bytes" in server.log
        totals = server.metrics()
        assert totals["vllm:kv_offload_tiering_write_bytes_total"] >= 0
    with Engine(tiny_llama, tiering(tmp_path / "kv")) as engine:
        again = engine.generate([PROMPT])[0]
        assert again.cached == 896
        assert again.tokens == first["choices"][0]["token_ids"]
