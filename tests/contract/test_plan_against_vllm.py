# SPDX-License-Identifier: Apache-2.0
"""The plan's blocks are vLLM's: the same layers through vLLM's own grouping."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest

from vllm_tiered_offload.cli.planning.groups import Parallel, layout_blocks
from vllm_tiered_offload.cli.planning.layers import Layer, read_layers
from vllm_tiered_offload.cli.planning.model_config import ModelError
from vllm_tiered_offload.cli.planning.topology import check_parallel

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
vllm_config = pytest.importorskip("vllm.config")
linear = pytest.importorskip("vllm.model_executor.layers.linear")
if importlib.util.find_spec("vllm.v1.core.kv_cache_planning"):  # vLLM 0.33
    from vllm.v1.core import kv_cache_planning as utils
else:
    from vllm.v1.core import kv_cache_utils as utils

BLOCK = 16


def vllm_spec(layer: Layer, tp: int):
    """vLLM's description of one layer in one worker."""
    if layer.latent:
        return interface.MLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=layer.values, dtype=torch.bfloat16
        )
    common = {
        "block_size": BLOCK,
        "num_kv_heads": max(1, layer.heads // tp),
        "head_size": layer.values // 2,
        "dtype": torch.bfloat16,
    }
    if layer.kind == "window":
        return interface.SlidingWindowSpec(**common, sliding_window=layer.window)
    return interface.FullAttentionSpec(**common)


def vllm_groups(layers: tuple[Layer, ...], tp: int):
    """The steps of vLLM's `get_kv_cache_groups` for models without packed layouts."""
    specs = {f"layer.{i}": vllm_spec(layer, tp) for i, layer in enumerate(layers)}
    if utils.is_kv_cache_spec_uniform(specs):
        return utils._get_kv_cache_groups_uniform_spec(specs)
    if uniform := interface.UniformTypeKVCacheSpecs.from_specs(specs):
        return utils._get_kv_cache_groups_uniform_type(uniform)
    specs = utils.unify_kv_cache_spec_page_size(specs)
    return utils._get_kv_cache_groups_uniform_page_size(specs)


def bytes_per_block(group) -> int:
    spec = group.kv_cache_spec
    if isinstance(spec, interface.UniformTypeKVCacheSpecs):
        return sum(layer.page_size_bytes for layer in spec.kv_cache_specs.values())
    return spec.page_size_bytes * len(group.layer_names)


FULL, WINDOW = Layer("full", 8, 256), Layer("window", 8, 256, 1024)
SMALL = Layer("window", 4, 256, 1024)


@pytest.mark.parametrize("tp", [1, 2, 16])
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((FULL,) * 32, id="dense"),
        pytest.param((WINDOW,) * 8, id="window"),
        pytest.param((FULL,) * 4 + (Layer("full", 4, 256),) * 4, id="two-head-counts"),
        pytest.param((Layer("full", 1, 576, latent=True),) * 27, id="latent"),
        pytest.param((WINDOW, FULL) * 6, id="hybrid-1-1"),
        pytest.param(((WINDOW,) * 5 + (FULL,)) * 10 + (WINDOW,) * 2, id="gemma3-27b"),
        pytest.param((FULL,) * 13 + (WINDOW,) * 12, id="nearly-equal"),
        pytest.param((FULL,) * 4 + (SMALL,) * 8, id="smaller-pages"),
    ],
)
def test_groups_and_bytes(layers, tp):
    ours = layout_blocks(layers, BLOCK, 2, Parallel(tp=tp))
    theirs = vllm_groups(layers, tp)
    assert sorted((g.layers, g.tokens_per_block) for g in ours.groups) == sorted(
        (len(g.layer_names), g.kv_cache_spec.block_size) for g in theirs
    )
    assert ours.worker_kv_bytes_per_block == max(map(bytes_per_block, theirs))


def vllm_takes(heads: int, kv_heads: int, tp: int, dcp: int) -> bool:
    """vLLM's own verdict: of its configuration, and of the layer that splits the heads."""
    config = SimpleNamespace(
        model_arch_config=SimpleNamespace(
            total_num_attention_heads=heads, total_num_kv_heads=kv_heads
        ),
        use_mla=False,
        multimodal_config=None,
        get_total_num_kv_heads=lambda: kv_heads,
    )
    try:
        parallel = vllm_config.ParallelConfig(
            tensor_parallel_size=tp, decode_context_parallel_size=dcp
        )
        vllm_config.ModelConfig.verify_with_parallel_config(config, parallel)
        with (
            mock.patch.object(linear, "get_tensor_model_parallel_world_size", return_value=tp),
            mock.patch.object(linear.ColumnParallelLinear, "__init__"),
        ):
            linear.QKVParallelLinear(64, 64, heads, kv_heads)
    except (ValueError, AssertionError):
        return False
    return True


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (24, 8), (12, 4), (28, 4), (16, 1)])
def test_the_sizes_that_vllm_takes(heads, kv_heads):
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
    }
    model = read_layers(config)
    taken = 0
    for tp, dcp in itertools.product(range(1, 36), (1, 2, 3, 4)):
        try:
            check_parallel(model, Parallel(tp, dcp=dcp))
            ours = True
        except ModelError:
            ours = False
        assert ours == vllm_takes(heads, kv_heads, tp, dcp), (tp, dcp)
        taken += ours
    assert taken >= 4
