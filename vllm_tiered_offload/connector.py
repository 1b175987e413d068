# SPDX-License-Identifier: Apache-2.0
"""`TieredOffloadingConnector`: vLLM's OffloadingConnector with our spec as default.

A convenience: it saves the `spec_name` line, shows the spec vLLM's configuration,
which the stock connector hides from the scheduler process, refuses a bad key before
the model is loaded, and tells the tiers which requests run with a LoRA adapter, so that
all others can be kept across restarts. Everything else is vLLM's. The class must carry
the name it is registered under: vLLM's MultiConnector finds a connector's statistics by
class name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from vllm_tiered_offload.config import SpecSettings
from vllm_tiered_offload.fs_tier.adapters import AdapterTag, tagging
from vllm_tiered_offload.plugin import CPU_SPEC, TIERING_SPEC

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_SPEC_MODULE = "vllm_tiered_offload.spec.tiering"


class TieredOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """OffloadingConnector that selects `AlignedTieringOffloadingSpec`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        _default_spec(vllm_config)
        with set_current_vllm_config(vllm_config), tagging():
            super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if request.lora_request is not None:
            # vLLM's own context of the request does not say so, and look-ups come later.
            state = self.scheduler._req_status[request.request_id]
            state.req_context.set_state(AdapterTag(request.lora_request.lora_int_id))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # vLLM asks in the front end while it puts its own configuration together, long before
        # any weights are loaded (where CUDA graphs are used; nothing else is asked that
        # early). A bad key stops it here. Directories are left to the engine's own host, and
        # the size of the pool, where it is missing, to --kv-offloading-size, which comes later.
        spec = extra_config.get("spec_name", TIERING_SPEC)
        if spec in (TIERING_SPEC, CPU_SPEC):
            known = {"cpu_bytes_to_use": 1, **extra_config}
            SpecSettings.parse(known, tiering=spec == TIERING_SPEC)
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        # The front end has its own copy of the configuration and never makes
        # a connector, so the default is set here too.
        _default_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _default_spec(vllm_config: VllmConfig) -> None:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    extra = transfer.kv_connector_extra_config
    if "spec_name" not in extra:
        extra["spec_name"] = TIERING_SPEC
        # With VLLM_PLUGINS leaving us out the name alone would not be known.
        extra.setdefault("spec_module_path", _SPEC_MODULE)
