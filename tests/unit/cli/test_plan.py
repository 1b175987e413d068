# SPDX-License-Identifier: Apache-2.0
"""The numbers of a plan, and the command around them."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from vllm_tiered_offload.cli.main import app
from vllm_tiered_offload.cli.planning.groups import Parallel, layout_blocks
from vllm_tiered_offload.cli.planning.layers import Layer, read_layers
from vllm_tiered_offload.cli.planning.numbers import (
    Request,
    chunks_in_segment,
    chunks_on_disk,
    make_plan,
    suggest_blocks_per_chunk,
)
from vllm_tiered_offload.config import SpecSettings, read_transfer

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
}
FULL, WINDOW = Layer("full", 8, 256), Layer("window", 8, 256, 1024)


def plan_for(config: dict, cpu: int = 64 * GIB, disk: int = 2 * 10**12, **request):
    return make_plan(read_layers(config), Request(cpu, disk, **request))


def test_llama_8b_by_hand():
    plan = plan_for(LLAMA_8B)
    # 32 layers x 8 heads x (128 + 128) x 2 bytes = 128 KiB a token.
    assert plan.kv_bytes_per_token == 131_072
    assert plan.chosen.kv_bytes_per_chunk == 2 << 20
    assert plan.chosen.cpu_chunks == 32_768
    assert plan.chosen.cpu_tokens == 524_288


def test_tensor_parallelism_splits_heads_until_there_is_one_each():
    alone, two, sixteen = (
        plan_for(LLAMA_8B, parallel=Parallel(tp)).blocks.worker_kv_bytes_per_block
        for tp in (1, 2, 16)
    )
    assert two == alone // 2
    assert sixteen == alone // 8


def test_pipeline_parallelism_takes_the_longest_stage():
    layers = (FULL,) * 10
    whole = layout_blocks(layers, 16, 2, Parallel()).worker_kv_bytes_per_block
    staged = layout_blocks(layers, 16, 2, Parallel(pp=4)).worker_kv_bytes_per_block
    assert staged == whole * 3 // 10


def test_latent_kv_is_kept_once():
    mla = {
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "hidden_size": 2048,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    one, eight = (plan_for(mla, parallel=Parallel(tp)) for tp in (1, 8))
    assert one.blocks.worker_kv_bytes_per_block == 4 * 576 * 2 * 16
    assert not one.blocks.replicated
    assert eight.blocks.replicated
    assert eight.chosen.cpu_chunks == one.chosen.cpu_chunks


@pytest.mark.parametrize(
    ("full", "window", "groups", "layers"),
    [
        (10, 20, 3, 10),  # 1:2 exactly
        (10, 52, 7, 10),  # the last groups are short
        (13, 12, 2, 13),  # nearly equal: padded up instead
        (2, 2, 2, 2),
    ],
)
def test_groups_of_a_hybrid(full, window, groups, layers):
    blocks = layout_blocks((FULL,) * full + (WINDOW,) * window, 16, 2, Parallel())
    assert len(blocks.groups) == groups
    page = 8 * 256 * 2 * 16
    assert blocks.worker_kv_bytes_per_block == layers * page
    assert sum(group.layers for group in blocks.groups) == full + window


def test_a_hybrids_smaller_pages_hold_more_tokens():
    small = Layer("window", 4, 256, 1024)
    blocks = layout_blocks((FULL,) * 2 + (small,) * 2, 16, 2, Parallel())
    assert {group.kind: group.tokens_per_block for group in blocks.groups} == {
        "full": 16,
        "window": 32,
    }


def test_every_group_of_a_hybrid_takes_chunks_for_the_same_tokens():
    hybrid = {
        **LLAMA_8B,
        "sliding_window": 1024,
        "layer_types": ["full_attention", "sliding_attention"] * 16,
    }
    plan, dense = plan_for(hybrid), plan_for(LLAMA_8B)
    assert plan.chosen.cpu_chunks == 2 * dense.chosen.cpu_chunks
    assert plan.chosen.cpu_tokens == dense.chosen.cpu_tokens
    assert plan.kv_bytes_per_token == dense.kv_bytes_per_token


def test_fp8_halves_and_float32_doubles():
    sizes = [
        plan_for(LLAMA_8B, **options).kv_bytes_per_token
        for options in ({"kv_cache_dtype": "fp8"}, {}, {"dtype": "float32"})
    ]
    assert sizes == [65_536, 131_072, 262_144]


def test_small_chunks_are_made_larger_and_large_ones_stay_one_block():
    small = layout_blocks((Layer("full", 1, 128),) * 4, 16, 2, Parallel())  # 16 KiB
    assert suggest_blocks_per_chunk(small, Parallel()) == 8
    tiny = layout_blocks((Layer("full", 1, 16),), 16, 2, Parallel())
    assert suggest_blocks_per_chunk(tiny, Parallel()) == 16  # 256 tokens, no more
    assert plan_for(LLAMA_8B).suggested == 1


def test_disk_capacity_is_below_the_bound_and_near_it():
    disk, chunk = 100 * GIB, 2 << 20
    held = chunks_on_disk(disk, chunk, 16 << 20) * chunk
    assert 0.98 * disk < held < disk
    assert chunks_on_disk(1 << 20, chunk, 16 << 20) == 0
    assert chunks_in_segment(1 << 20, chunk, 16 << 20) == 0


def run(tmp_path, *arguments: str):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return CliRunner().invoke(app, ["plan", "--model", str(tmp_path), *arguments])


def test_the_printed_configuration_is_valid_and_complete(tmp_path):
    result = run(tmp_path, "--cpu-bytes", "64GiB", "--disk-bytes", "2TB")
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "vllm serve" in line]
    words = shlex.split(line)
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    settings = SpecSettings.parse(config["kv_connector_extra_config"], tiering=True)
    assert settings.cpu_bytes_to_use == 64 * GIB
    assert settings.fs_tiers()[0].max_bytes == 2 * 10**12


def words_to_paste(output: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if "vllm serve" in line]
    return shlex.split(line)


def test_the_line_to_paste_gives_what_was_planned(tmp_path):
    (tmp_path / "a model").mkdir()
    given = ("--tp", "16", "--pp", "2", "--dcp", "2", "--block-size", "32", "--dtype", "half")
    result = run(
        tmp_path / "a model",
        *("--cpu-bytes", "64GiB", "--disk-bytes", "2TB", "--kv-cache-dtype", "fp8", *given),
    )
    assert result.exit_code == 0, result.output
    words = words_to_paste(result.output)
    assert words[:-2] == [
        *("vllm", "serve", str(tmp_path / "a model")),
        *("--tensor-parallel-size", "16", "--pipeline-parallel-size", "2"),
        *("--decode-context-parallel-size", "2", "--block-size", "32"),
        *("--dtype", "half", "--kv-cache-dtype", "fp8"),
    ]
    assert "assumed" not in result.output


def test_what_is_vllms_own_choice_is_not_in_the_line(tmp_path):
    result = run(tmp_path, "--cpu-bytes", "64GiB", "--disk-bytes", "2TB")
    assert words_to_paste(result.output)[3] == "--kv-transfer-config"
    assert "16 tokens (assumed)" in result.output


def test_without_a_disk_the_spec_is_the_one_without_tiers(tmp_path):
    result = run(tmp_path, "--cpu-bytes", "64GiB", "--disk-bytes", "0", "--json")
    document = json.loads(result.stdout)
    found = read_transfer(document["kv_transfer_config"])
    assert (found.problems, found.doubts) == ([], [])
    extra = document["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["spec_name"] == "AlignedCPUOffloadingSpec"


def test_a_config_file_is_served_as_its_directory(tmp_path):
    run(tmp_path)
    model = str(tmp_path / "config.json")
    sizes = ("--cpu-bytes", "1GiB", "--disk-bytes", "1TB")
    result = CliRunner().invoke(app, ["plan", "--model", model, *sizes, "--json"])
    command = json.loads(result.stdout)["command"]
    assert command[:3] == ["vllm", "serve", str(tmp_path)]
    assert json.loads(command[-1]) == json.loads(result.stdout)["kv_transfer_config"]


def test_eighty_columns_are_enough_but_for_the_line_to_paste(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    sizes = ("--cpu-bytes", "1TiB", "--disk-bytes", "999TB")
    result = CliRunner().invoke(
        app, ["plan", "--model", str(tmp_path), *sizes], env={"COLUMNS": "80"}
    )
    lines = [line for line in result.output.splitlines() if "vllm serve" not in line]
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80


def test_json_says_the_same(tmp_path):
    result = run(
        tmp_path,
        *("--cpu-bytes", "1GiB", "--disk-bytes", "10GB", "--blocks-per-chunk", "2", "--json"),
    )
    document = json.loads(result.output)
    assert document["kv_bytes_per_chunk"] == 4 << 20
    assert document["cpu_chunks"] == 256
    extra = document["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["blocks_per_chunk"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpu-bytes", "64G", "--disk-bytes", "1TB"], "--cpu-bytes: '64G'"),
        (["--cpu-bytes", "1MiB", "--disk-bytes", "1TB"], "--cpu-bytes: 1048576"),
        (["--cpu-bytes", "1GiB", "--disk-bytes", "1MiB"], "--disk-bytes: '1MiB'"),
        (["--cpu-bytes", "1GiB", "--disk-bytes", "1TB", "--dtype", "int3"], "int3"),
        (["--cpu-bytes", "1GiB", "--disk-bytes", "1TB", "--dtype", "fp8"], "--dtype: 'fp8'"),
        (
            ["--cpu-bytes", "1GiB", "--disk-bytes", "1TB", "--kv-cache-dtype", "float32"],
            "--kv-cache-dtype: 'float32'",
        ),
        (
            ["--cpu-bytes", "1GiB", "--disk-bytes", "1TB", "--root-dir", "kv"],
            "--root-dir: 'kv'",
        ),
        (["--cpu-bytes", "1GiB", "--disk-bytes", "1TB", "--tp", "3"], "--tp: 3"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(tmp_path, arguments, message):
    result = run(tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
