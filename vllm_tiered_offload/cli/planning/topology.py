# SPDX-License-Identifier: Apache-2.0
"""Sizes of parallelism that vLLM refuses for a model.

The rules are those of vLLM's `ModelConfig.verify_with_parallel_config`, of its
`QKVParallelLinear` (heads are split evenly, or each is copied to equally many workers) and of
its `ParallelConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_tiered_offload.cli.planning.groups import Parallel
from vllm_tiered_offload.cli.planning.layers import ModelKv
from vllm_tiered_offload.cli.planning.model_config import ModelError


def check_parallel(model: ModelKv, parallel: Parallel) -> None:
    """Refuse what vLLM would refuse.

    Raises:
        ModelError: one line that names the option and the values that would be taken.
    """
    for problem in _problems(model, parallel):
        raise ModelError(problem)


def _problems(model: ModelKv, parallel: Parallel) -> Iterator[str]:
    tp, pp, dcp = parallel.tp, parallel.pp, parallel.dcp
    if not _splits(model, tp):
        good = [str(n) for n in range(1, model.attention_heads + 1) if _splits(model, n)]
        yield (
            f"--tp: {tp} does not split {_heads(model)}; vLLM takes {', '.join(good)} for this "
            "model"
        )
    if pp > len(model.layers):
        yield f"--pp: {pp} is more than the model's {len(model.layers)} layers"
    if tp % dcp:
        yield f"--dcp: {dcp} does not divide --tp {tp}; vLLM takes divisors of it"
    if dcp > 1 and (kv_heads := _kv_heads(model)):
        copies = tp // max(kv_heads)
        per_head = model.attention_heads // max(kv_heads)
        if copies < 2:
            yield (
                f"--dcp: {dcp} needs copies of KV heads; give a --tp above {max(kv_heads)}, or "
                "--dcp 1"
            )
        elif dcp > copies or per_head % dcp:
            yield (
                f"--dcp: {dcp} must divide the {per_head} query heads of a KV head and be at "
                f"most {copies} with --tp {tp}"
            )


def _splits(model: ModelKv, tp: int) -> bool:
    if model.attention_heads % tp:
        return False
    return all(heads % tp == 0 or tp % heads == 0 for heads in _kv_heads(model))


def _kv_heads(model: ModelKv) -> set[int]:
    """The counts of key-value heads of its layers; none where each worker holds all KV."""
    kept = [layer for layer in model.layers if layer.kind != "state" and not layer.latent]
    return {layer.heads for layer in kept}


def _heads(model: ModelKv) -> str:
    words = f"{model.attention_heads} attention heads"
    if kv := _kv_heads(model):
        words += f" and {', '.join(map(str, sorted(kv)))} KV heads"
    return words
