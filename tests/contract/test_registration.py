# SPDX-License-Identifier: Apache-2.0
"""Our names in vLLM's factories: idempotent, lazy, harmless where vLLM differs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from vllm_tiered_offload import compat, plugin

REGISTRIES = {
    plugin.CONNECTOR: KVConnectorFactory,
    plugin.CPU_SPEC: OffloadingSpecFactory,
    plugin.TIERING_SPEC: OffloadingSpecFactory,
    plugin.TIER: SecondaryTierFactory,
}


@pytest.fixture(autouse=True)
def fresh_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, factory in REGISTRIES.items():
        without_ours = {k: v for k, v in factory._registry.items() if k not in REGISTRIES}
        monkeypatch.setattr(factory, "_registry", without_ours)
        assert name not in factory._registry


def test_all_four_names_resolve_to_classes_of_the_right_kind() -> None:
    plugin.register()
    plugin.register()  # vLLM may load plugins more than once in a process

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    connector = KVConnectorFactory._registry[plugin.CONNECTOR]()
    assert issubclass(connector, OffloadingConnector)
    assert connector.__name__ == plugin.CONNECTOR  # vLLM's MultiConnector needs it
    assert issubclass(OffloadingSpecFactory._registry[plugin.CPU_SPEC](), CPUOffloadingSpec)
    spec = OffloadingSpecFactory._registry[plugin.TIERING_SPEC]()
    assert issubclass(spec, TieringOffloadingSpec)
    assert issubclass(SecondaryTierFactory._registry[plugin.TIER](), SecondaryTierManager)


def test_the_package_and_the_entry_point_import_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, vllm_tiered_offload.plugin\n"
        "assert not {'vllm', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registering_loads_none_of_our_classes() -> None:
    code = (
        "import sys, vllm\n"
        "from vllm_tiered_offload.plugin import register\n"
        "register()\n"
        "m = 'vllm_tiered_offload.'; heavy = [x for x in sys.modules if x.startswith(m)]\n"
        "assert set(heavy) <= {m + 'plugin', m + 'compat'}, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_vllm_without_what_we_need_is_left_alone_until_a_name_is_selected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "_NEEDED", (("vllm.v1.kv_offload.base", "NotThere"),))
    compat.unsupported_reason.cache_clear()
    monkeypatch.setattr(plugin.logger, "propagate", True)
    try:
        plugin.register()
        lines = [r.getMessage() for r in caplog.records if r.name == plugin.logger.name]
        assert len(lines) == 1
        assert "NotThere" in lines[0]
        assert compat.SUPPORTED_VLLM in lines[0]
        with pytest.raises(RuntimeError, match="NotThere"):
            OffloadingSpecFactory._registry[plugin.TIERING_SPEC]()
    finally:
        compat.unsupported_reason.cache_clear()


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, object]:
        raise RuntimeError("a vLLM nobody has seen")

    monkeypatch.setattr(compat, "factories", broken)
    plugin.register()


def test_factories_that_do_not_exist_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    only_connector = {"connector": compat._FACTORIES["connector"], "spec": ("vllm.gone", "X")}
    monkeypatch.setattr(compat, "_FACTORIES", only_connector)
    plugin.register()
    assert plugin.CONNECTOR in KVConnectorFactory._registry
    assert plugin.TIERING_SPEC not in OffloadingSpecFactory._registry


def test_call_passes_only_the_keywords_a_function_knows() -> None:
    def old(a: int, *, b: int = 0) -> tuple[int, int]:
        return a, b

    def new(a: int, **rest: int) -> dict[str, int]:
        return {"a": a, **rest}

    assert compat.call(old, 1, b=2, info=3) == (1, 2)
    assert compat.call(new, 1, info=3) == {"a": 1, "info": 3}
