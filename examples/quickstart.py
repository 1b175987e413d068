# SPDX-License-Identifier: Apache-2.0
"""The main job, shown: one prompt answered from nothing, from memory and from disk.

Four measurements on a small random-weight Llama, in three engine processes; the
answers must be the same tokens every time. Run by `examples/quickstart.sh`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 2048
ANSWER_TOKENS = 16
# Chosen so that computing the prompt takes a few seconds on two cores.
MODEL = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
ROWS = {
    "cold": "1  cold engine, computed",
    "memory": "2  same engine, from CPU memory",
    "disk": "3  new engine process, from disk",
    "plain": "4  vLLM without the plugin, computed",
}


def make_model(directory: Path) -> None:
    """Write a Llama with random weights and a one-character tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).to(torch.bfloat16).save_pretrained(str(directory))
    vocab = {chr(i): i for i in range(256)} | {f"<x{i}>": i for i in range(256, 512)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<x256>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<x256>",
        eos_token="<x257>",
        bos_token="<x258>",
    ).save_pretrained(str(directory))


def kv_transfer_config(root: Path) -> dict[str, Any]:
    """What a user passes to `--kv-transfer-config`."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "AlignedTieringOffloadingSpec",
            "cpu_bytes_to_use": "256MiB",
            "secondary_tiers": [
                {"type": "odirect_fs", "root_dir": str(root), "max_bytes": "2GiB"}
            ],
        },
    }


def run_phase(phase: str, work: Path) -> None:
    """In a child process: one engine, one or two measurements, written as JSON."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {}
    if phase != "plain":
        options["kv_transfer_config"] = KVTransferConfig(**kv_transfer_config(work / "kv"))
    llm = LLM(
        model=str(work / "model"),
        enforce_eager=True,
        max_model_len=4096,
        disable_log_stats=False,
        **options,
    )
    source = random.Random(1)
    ask(llm, [source.randrange(3, 500) for _ in range(64)])  # first-use costs are not the point
    results = {}
    if phase == "first":
        results["cold"] = measure(llm)
        settle(llm)
        llm.reset_prefix_cache()
        results["memory"] = measure(llm)
    else:
        results["disk" if phase == "second" else "plain"] = measure(llm)
    # A graceful stop lets the engine finish its stores first.
    llm.llm_engine.engine_core.shutdown(timeout=60)
    (work / f"{phase}.json").write_text(json.dumps(results))


def ask(llm: Any, prompt: list[int]) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]


def measure(llm: Any) -> dict[str, Any]:
    source = random.Random(0)
    before = disk_bytes_read(llm)
    output = ask(llm, [source.randrange(3, 500) for _ in range(PROMPT_TOKENS)])
    return {
        "seconds": output.metrics.first_token_latency,
        "cached": output.num_cached_tokens,
        "disk_bytes": disk_bytes_read(llm) - before,
        "tokens": list(output.outputs[0].token_ids),
    }


def disk_bytes_read(llm: Any) -> int:
    name = "vllm:kv_offload_tiering_read_bytes"
    return int(sum(m.value for m in llm.get_metrics() if m.name == name))


def settle(llm: Any) -> None:
    """Give the last chunks of the prompt time to reach the CPU pool."""
    time.sleep(1.0)


def run_children(work: Path) -> dict[str, dict[str, Any]]:
    # vLLM reserves a core a rank for any connector; the same threads in all four
    # runs keep the comparison fair.
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }
    results: dict[str, dict[str, Any]] = {}
    for phase in ("first", "second", "plain"):
        print(f"quickstart: engine {phase!r} runs; its log is {work / phase}.log", flush=True)
        command = [sys.executable, __file__, "--phase", phase, "--work", str(work)]
        with (work / f"{phase}.log").open("w") as log:
            status = subprocess.run(command, env=env, stdout=log, stderr=log, check=False)
        if status.returncode:
            print("\n".join((work / f"{phase}.log").read_text().splitlines()[-30:]))
            sys.exit(f"quickstart: engine {phase!r} failed, see above")
        results |= json.loads((work / f"{phase}.json").read_text())
    return results


def report(results: dict[str, dict[str, Any]]) -> bool:
    """Print the table; True if all four answers are the same tokens."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"One prompt of {PROMPT_TOKENS} tokens, {ANSWER_TOKENS} tokens answered"
    )
    for column in ("engine", "time to first token", "tokens from cache", "read from disk"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for key, title in ROWS.items():
        row = results[key]
        table.add_row(
            title,
            f"{row['seconds']:.3f} s",
            str(row["cached"]),
            f"{row['disk_bytes'] / 2**20:.1f} MiB",
        )
    console = Console(width=100)
    console.print(table)
    same = len({tuple(results[key]["tokens"]) for key in ROWS}) == 1
    console.print(
        "Output tokens are identical in all four."
        if same
        else f"OUTPUT TOKENS DIFFER: { {key: results[key]['tokens'] for key in ROWS} }"
    )
    return same


def verdict(results: dict[str, dict[str, Any]]) -> str | None:
    """What went wrong, or None: rows 2 and 3 must really come from a cache."""
    if results["memory"]["cached"] == 0:
        return "row 2 took no tokens from the CPU pool"
    if results["disk"]["cached"] == 0 or results["disk"]["disk_bytes"] == 0:
        return "row 3 took nothing from the disk"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phase", choices=["first", "second", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help="keep model, cache and logs in this folder")
    arguments = parser.parse_args()
    if arguments.phase:
        run_phase(arguments.phase, arguments.work)
        return
    work = arguments.work or Path(tempfile.mkdtemp(prefix="vto-quickstart-"))
    work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "kv", ignore_errors=True)
    try:
        if not (work / "model").exists():
            print("quickstart: making a small Llama with random weights", flush=True)
            make_model(work / "model")
        results = run_children(work)
        same = report(results)
        problem = verdict(results)
    except SystemExit:
        print(f"quickstart: logs are kept in {work}")
        raise
    if not same or problem:
        sys.exit(f"quickstart: {problem or 'the answers differ'}; logs are kept in {work}")
    if arguments.work is None:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
