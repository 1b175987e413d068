# SPDX-License-Identifier: Apache-2.0
"""Concurrent long prompts on a pool that holds one of them: with and without patience.

    python -m benchmarks.patience --prompts 8 --chunks 12

A first engine stores every prompt on disk. Then, for every `--patience`, a new
engine with a small CPU pool gets all of them at once. Reported: time to first
token, prompt tokens recomputed, bytes read from disk, and whether the tokens
equal those of the first engine. Exit status 1 when they do not, or when patience
does not lower the recomputed tokens.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks._common import Bar, console, print_bars, write_json
from tests.support.engine import Engine, prompt, tiering
from tests.support.tiny_model import make_llama

BLOCK = 128  # tokens: vLLM's block on CPUs
LAYERS, KV_HEADS, HEAD = 8, 4, 64
CHUNK_BYTES = BLOCK * LAYERS * KV_HEADS * HEAD * 2 * 2  # K and V, two bytes each
READ = "vllm:kv_offload_tiering_read_bytes"


@dataclass(frozen=True)
class Measured:
    """Seconds, tokens, bytes; over all prompts of one engine."""

    first_token_mean: float
    first_token_last: float
    seconds: float
    recomputed_tokens: int
    read_bytes: int
    equal: bool


def store_all(model: Path, root: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Every prompt to disk (an engine stops when all is stored); the tokens that follow."""
    chunks = sum(len(p) // BLOCK for p in prompts)
    with Engine(model, tiering(root, cpu_bytes=(chunks + 8) * CHUNK_BYTES)) as engine:
        outputs = [engine.generate([p])[0] for p in prompts]
    return [output.tokens for output in outputs]


def measure(
    model: Path,
    root: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    pool: int,
    patience: float,
) -> Measured:
    config = tiering(
        root, cpu_bytes=pool * CHUNK_BYTES, tier={"mode": "read"}, patience=patience
    )
    with Engine(model, config, max_num_batched_tokens=4096) as engine:
        engine.generate([prompt(64, seed=999)])  # warm-up
        outputs = engine.generate(prompts)
        read = engine.metrics().get(READ, 0.0)
    firsts = [output.ttft or 0.0 for output in outputs]
    return Measured(
        first_token_mean=statistics.mean(firsts),
        first_token_last=max(firsts),
        seconds=outputs[0].seconds,
        recomputed_tokens=sum(len(p) - o.cached for p, o in zip(prompts, outputs, strict=True)),
        read_bytes=int(read),
        equal=[output.tokens for output in outputs] == expected,
    )


def print_table(results: dict[float, Measured]) -> None:
    table = Table(title="all prompts at once", title_justify="left")
    for column in (
        "patience, s",
        "first token, mean s",
        "last s",
        "all done s",
        "recomputed tokens",
        "disk MiB",
        "tokens equal",
    ):
        table.add_column(column, justify="right")
    for patience, m in results.items():
        table.add_row(
            f"{patience:g}",
            f"{m.first_token_mean:.2f}",
            f"{m.first_token_last:.2f}",
            f"{m.seconds:.2f}",
            str(m.recomputed_tokens),
            f"{m.read_bytes / 2**20:.1f}",
            str(m.equal),
        )
    console.print(table)


def main(
    prompts: Annotated[int, typer.Option(min=2)] = 8,
    chunks: Annotated[int, typer.Option(min=1, max=30, help="of every prompt")] = 12,
    pool: Annotated[int, typer.Option(min=2, help="chunks of the CPU pool")] = 24,
    patience: Annotated[list[float], typer.Option(help="seconds; may be repeated")] = [0, 2],  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    texts = [prompt(chunks * BLOCK + 40, seed=i) for i in range(prompts)]
    with tempfile.TemporaryDirectory(prefix="bench-patience-") as scratch:
        model = make_llama(
            Path(scratch) / "model",
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=KV_HEADS,
        )
        root = Path(scratch) / "kv"
        expected = store_all(model, root, texts)
        results = {p: measure(model, root, texts, expected, pool, p) for p in patience}
    print_table(results)
    least, most = results[min(patience)], results[max(patience)]
    total = sum(len(text) for text in texts)
    bars = [
        Bar("prompts with other tokens", sum(not m.equal for m in results.values()), 0),
        Bar(
            "recomputed with patience, part of without",
            most.recomputed_tokens / least.recomputed_tokens,
            1.0,
        ),
        Bar(
            "bytes read, part of the prompts'",
            most.read_bytes / (total // BLOCK * CHUNK_BYTES),
            1.0,
        ),
    ]
    held = print_bars(bars)
    write_json(json_file, {f"patience {p:g}": vars(m) for p, m in results.items()}, bars)
    raise typer.Exit(0 if held else 1)


if __name__ == "__main__":
    typer.run(main)
