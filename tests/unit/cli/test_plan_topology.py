# SPDX-License-Identifier: Apache-2.0
"""Sizes of parallelism that vLLM refuses are refused by the plan."""

import pytest

from vllm_tiered_offload.cli.planning.groups import Parallel
from vllm_tiered_offload.cli.planning.layers import read_layers
from vllm_tiered_offload.cli.planning.model_config import ModelError
from vllm_tiered_offload.cli.planning.topology import check_parallel

GROUPED = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
# 24 heads, of which 3 read one KV head: 3 divides the ones and not the others.
ODD = {**GROUPED, "num_attention_heads": 24, "head_dim": 128}
MIXED = {**GROUPED, "num_key_value_heads": [8, 4] * 16}
LATENT = {
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


@pytest.mark.parametrize(
    ("config", "parallel"),
    [
        *((GROUPED, Parallel(tp)) for tp in (1, 2, 4, 8, 16, 32)),
        (GROUPED, Parallel(16, dcp=2)),
        (GROUPED, Parallel(32, dcp=4)),
        (GROUPED, Parallel(1, pp=32)),
        (GROUPED, Parallel(2, pp=3)),  # uneven stages
        (ODD, Parallel(8)),
        (ODD, Parallel(24)),
        (MIXED, Parallel(8)),
        (LATENT, Parallel(16, dcp=4)),
    ],
)
def test_taken(config, parallel):
    check_parallel(read_layers(config), parallel)


@pytest.mark.parametrize(
    ("config", "parallel", "message"),
    [
        (
            GROUPED,
            Parallel(3),
            r"--tp: 3 .*32 attention heads and 8 KV.*1, 2, 4, 8, 16, 32 for",
        ),
        (GROUPED, Parallel(64), r"--tp: 64 "),
        (ODD, Parallel(3), r"--tp: 3 .*takes 1, 2, 4, 8, 24 for"),
        (MIXED, Parallel(3), r"--tp: 3 .*4, 8 KV heads"),
        (
            LATENT,
            Parallel(3),
            r"--tp: 3 does not split 16 attention heads; vLLM takes 1, 2, 4,",
        ),
        (GROUPED, Parallel(pp=33), r"--pp: 33 is more than the model's 32 layers"),
        (GROUPED, Parallel(8, dcp=3), r"--dcp: 3 does not divide --tp 8"),
        (GROUPED, Parallel(8, dcp=2), r"--dcp: 2 .*--tp above 8"),
        (GROUPED, Parallel(16, dcp=4), r"--dcp: 4 .*at most 2 with --tp 16"),
        (ODD, Parallel(24, dcp=2), r"--dcp: 2 must divide the 3 query heads"),
    ],
)
def test_refused(config, parallel, message):
    with pytest.raises(ModelError, match=message):
        check_parallel(read_layers(config), parallel)
