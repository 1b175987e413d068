# SPDX-License-Identifier: Apache-2.0
"""The connector tags requests with an adapter, through vLLM's own scheduler side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from vllm_tiered_offload import connector as connector_module
from vllm_tiered_offload.connector import TieredOffloadingConnector
from vllm_tiered_offload.fs_tier import adapters


@pytest.fixture
def connector() -> Any:
    scheduler = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    scheduler.manager = MagicMock()
    scheduler.config = SimpleNamespace(kv_group_configs=())
    scheduler._req_status = {}
    made = TieredOffloadingConnector.__new__(TieredOffloadingConnector)
    made.connector_scheduler = scheduler
    return made


def request(name: str, adapter: int | None) -> Any:
    lora = None if adapter is None else SimpleNamespace(lora_int_id=adapter)
    return SimpleNamespace(
        request_id=name, lora_request=lora, kv_transfer_params=None, kv_hints=None
    )


@pytest.mark.parametrize("adapter", [None, 1, 7])
def test_requests_with_an_adapter_are_tagged(connector: Any, adapter: int | None) -> None:
    connector.on_new_request(request("a", adapter))
    # The very object that the tiers were shown and will be shown at every look-up.
    (context,) = connector.scheduler.manager.on_new_request.call_args.args
    assert adapters.adapter_of(context) == adapter


def test_a_request_id_used_again_starts_untagged(connector: Any) -> None:
    connector.on_new_request(request("a", 3))
    connector.on_new_request(request("a", None))
    (context,) = connector.scheduler.manager.on_new_request.call_args.args
    assert adapters.adapter_of(context) is None


def test_tiers_are_built_knowing_that_requests_are_tagged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(
        connector_module.OffloadingConnector,
        "__init__",
        lambda *_: seen.append(adapters.tagging_enabled()),
    )
    config = MagicMock()
    config.kv_transfer_config.kv_connector_extra_config = {"spec_name": "x"}
    TieredOffloadingConnector(config, MagicMock(), MagicMock())
    assert seen == [True]
    assert not adapters.tagging_enabled()
