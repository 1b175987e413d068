# SPDX-License-Identifier: Apache-2.0
"""Real servers, multi-turn conversations, with and without offloading, side by side.

The conversations' KV exceeds vLLM's own cache and the CPU pool. One row a variant:
without offloading, vLLM's CPU-only connector (GPUs), our spec with vLLM's fs tier and with
our tier, each also in a new server on the directory of the one before, and our tier with
answers offloaded too. Needs nothing on a CPU machine; on GPUs give --model.

Answers are not compared: requests are batched as they come, and a batch of another shape
rounds differently. The quickstart and the tests compare tokens, one request at a time.

    python benchmarks/serve.py [--model M] [--plot serve.png] [--json serve.json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.table import Table

from benchmarks._client import Answer, Load, run
from benchmarks._common import console
from tests.support.server import Server
from tests.support.tiny_model import make_llama

# Large enough that computing a prompt takes seconds on two cores.
CPU_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True)
class Variant:
    name: str
    spec: str | None  # None: no connector
    tier: str | None = None
    again: bool = False  # a new server on the directory of the variant before
    answers_too: bool = False  # offload_prompt_only false


TIERING = "AlignedTieringOffloadingSpec"
VARIANTS = (
    Variant("no offloading", None),
    Variant("vLLM, CPU memory only", "CPUOffloadingSpec"),
    Variant("our spec, CPU memory only", "AlignedCPUOffloadingSpec"),
    Variant("vLLM's fs tier", TIERING, "fs"),
    Variant("vLLM's fs tier, restarted", TIERING, "fs", again=True),
    Variant("our tier", TIERING, "odirect_fs"),
    Variant("our tier, restarted", TIERING, "odirect_fs", again=True),
    Variant("our tier, answers too", TIERING, "odirect_fs", answers_too=True),
    Variant("... restarted", TIERING, "odirect_fs", again=True, answers_too=True),
)


@dataclass(frozen=True)
class Row:
    name: str
    ttft_p50: float
    ttft_p99: float
    later_ttft_p50: float  # turns after the first
    later_ttft_p99: float
    tokens_per_second: float
    hit_rate: float


def transfer_config(
    variant: Variant, root: Path, options: argparse.Namespace
) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "spec_name": variant.spec,
        "cpu_bytes_to_use": options.cpu_bytes,
        "offload_prompt_only": not variant.answers_too,
    }
    if variant.tier:
        place = root / f"{variant.tier}-{'answers-too' if variant.answers_too else 'prompts'}"
        tier: dict[str, Any] = {"type": variant.tier, "root_dir": str(place)}
        if variant.tier == "odirect_fs":
            tier["max_bytes"] = "16GiB"
        extra["secondary_tiers"] = [tier]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def server_arguments(variant: Variant, root: Path, options: argparse.Namespace) -> list[str]:
    arguments = [
        "--num-gpu-blocks-override",
        str(options.gpu_blocks),
        "--no-enable-log-requests",
    ]
    arguments += ["--enable-prompt-tokens-details"]
    if variant.spec:
        config = transfer_config(variant, root, options)
        arguments += ["--kv-transfer-config", json.dumps(config)]
    return arguments + options.vllm_arguments


def measure(variant: Variant, root: Path, load: Load, options: argparse.Namespace) -> Row:
    scratch = Path(tempfile.mkdtemp(dir=root))
    arguments = server_arguments(variant, root, options)
    env = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    with Server(Path(options.model), arguments, scratch=scratch, env=env) as server:
        server.complete([3] * 64)  # first-use costs are not the point
        answers, seconds = run(f"http://127.0.0.1:{server.port}", str(options.model), load)
    return summarise(variant.name, answers, seconds)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share * len(values)))]


def summarise(name: str, answers: list[Answer], seconds: float) -> Row:
    times = [a.first_token for a in answers]
    later = [a.first_token for a in answers if a.turn > 0] or times
    return Row(
        name=name,
        ttft_p50=statistics.median(times),
        ttft_p99=percentile(times, 0.99),
        later_ttft_p50=statistics.median(later),
        later_ttft_p99=percentile(later, 0.99),
        tokens_per_second=sum(a.prompt_tokens + len(a.tokens) for a in answers) / seconds,
        hit_rate=sum(a.cached for a in answers) / sum(a.prompt_tokens for a in answers),
    )


def runs_here(variant: Variant) -> bool:
    import torch

    return variant.spec != "CPUOffloadingSpec" or torch.cuda.is_available()


COLUMNS = ("", "TTFT p50", "p99", "turns 2.. p50", "p99", "speed-up", "tokens/s", "hit rate")


def show(rows: list[Row]) -> None:
    table = Table(title="time to first token in seconds", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left")
    base = rows[0].later_ttft_p50
    for row in rows:
        times = (row.ttft_p50, row.ttft_p99, row.later_ttft_p50, row.later_ttft_p99)
        table.add_row(
            row.name,
            *(f"{seconds:.3f}" for seconds in times),
            f"{base / row.later_ttft_p50:.1f} x",
            f"{row.tokens_per_second:.0f}",
            f"{row.hit_rate:.1%}",
        )
    console.print(table)
    console.print("speed-up: of the median of turns 2.. against the first row")


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.6 * len(rows) + 1.4))
    names = [row.name for row in rows][::-1]
    axes.barh(names, [row.later_ttft_p50 for row in rows][::-1], color="#4c72b0")
    axes.set_xlabel("time to first token, median of the turns after the first (s)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: a 150M Llama with random weights, made here")
    parser.add_argument("--root", type=Path, help="where the tiers live; default: a new folder")
    parser.add_argument("--cpu-bytes", type=int, default=128 * 2**20)
    parser.add_argument(
        "--gpu-blocks", type=int, default=48, help="vLLM's own cache, in blocks"
    )
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--shared-tokens", type=int, default=256)
    parser.add_argument("--turn-tokens", type=int, default=640)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("vllm_arguments", nargs="*", help="after --: passed to vllm serve")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    root = options.root or Path(tempfile.mkdtemp(prefix="vto-serve-"))
    root.mkdir(parents=True, exist_ok=True)
    options.model = options.model or make_llama(root / "model", **CPU_MODEL)
    load = Load(
        conversations=options.conversations,
        turns=options.turns,
        shared_tokens=options.shared_tokens,
        turn_tokens=options.turn_tokens,
        answer_tokens=options.answer_tokens,
        concurrency=options.concurrency,
    )
    rows: list[Row] = []
    try:
        for variant in filter(runs_here, VARIANTS):
            console.print(f"running: {variant.name}")
            rows.append(measure(variant, root, load, options))
    finally:
        if options.root is None:
            shutil.rmtree(root, ignore_errors=True)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
