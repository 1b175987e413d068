# SPDX-License-Identifier: Apache-2.0
"""The steps of `gpu_check.sh`. Each runs in a process of its own, with a time limit."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
MIB = 1 << 20


def about(device: str) -> str:
    """Versions and device, so that the table can be kept."""
    import torch
    import vllm

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU platform"
    return f"vLLM {vllm.__version__}, torch {torch.__version__}, {name}"


def transfers(device: str, backing: str, huge_pages: str, factors: Sequence[int]) -> str:
    """Byte-exact both ways, and pinned where the device can pin."""
    from tests.support import device_check
    from vllm_tiered_offload.region.shared_region import RegionSettings

    settings = RegionSettings(backing=backing, huge_pages=huge_pages)  # type: ignore[arg-type]
    facts: dict[str, object] = {}
    for shape in device_check.SHAPES.values():
        for factor in factors:
            facts = device_check.check_transfer(device, shape, factor, settings)
            assert facts["pinned"] or device == "cpu", "vLLM could not pin the region"
    pinned = "pinned" if facts["pinned"] else "not pinned"
    return f"{facts.get('backing', backing)}, {pinned}, block factors {list(factors)}"


def memfd(device: str) -> str:
    return transfers(device, "memfd", "auto", (1, 2, 8))


def file_in_shm(device: str) -> str:
    return transfers(device, "shm", "off", (2,))


def huge_pages(device: str) -> str:
    """A region large enough for huge pages; how many bytes really are."""
    from tests.support import device_check

    row, chunks = 2 * MIB, 256
    region = device_check.open_region(chunks, row, row=row)
    facts = region.describe()
    _, _, pinned = device_check.rates(device, region, 8, row // 8, chunks, repeats=2)
    assert pinned or device == "cpu", "vLLM could not pin the region"
    huge = int(facts.get("huge_bytes") or 0)  # type: ignore[call-overload]
    if huge:
        return f"{huge >> 20} of {chunks * row >> 20} MiB huge"
    return f"none given: {facts.get('huge_hint') or 'no reason found'}"


def timing(device: str) -> str:
    """GB/s of vLLM's worker over our region and over vLLM's, 0.5 GiB in 64 KiB pages."""
    from tests.support import device_check

    layers, page, blocks = 32, 64 << 10, 256
    slot = layers * page
    ours = device_check.rates(
        device, device_check.open_region(blocks, slot), layers, page, blocks
    )
    text = f"ours: store {ours[0]:.1f}, load {ours[1]:.1f} GB/s"
    try:
        region = device_check.vllms_region(blocks, slot)
    except OSError as error:  # a /dev/shm of 64 MiB, as Docker has it
        return f"{text}; vLLM's own region: {error}"
    theirs = device_check.rates(device, region, layers, page, blocks)
    ratio = min(ours[0] / theirs[0], ours[1] / theirs[1])
    return f"{text}; vLLM's: {theirs[0]:.1f}, {theirs[1]:.1f}; ratio {ratio:.2f}"


def restart(device: str) -> str:
    """A prefix from memory, then from disk in a new engine, with vLLM's own tokens.

    The same work is compared: vLLM's answers with the prefix in its own cache. (A prefix
    computed and one loaded go through other kernels, which may break ties differently.)
    """
    from tests.support.engine import Engine, prompt
    from tests.support.tiny_model import make_llama

    work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    # A head of 64: what all attention backends support.
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = make_llama(work / "model", **sizes)
    options = {"gpu_memory_utilization": 0.3} if device == "cuda" else {}
    prompts = [prompt(1500, seed=1), prompt(1027, seed=2)]

    def answers(engine: Engine) -> list[tuple[list[int], int]]:
        found = [engine.generate([p], max_tokens=16)[0] for p in prompts]
        return [(o.tokens, o.cached) for o in found]

    config, by = tiering_config(work / "kv")
    with Engine(model, processes=True, **options) as engine:
        computed, cached = answers(engine), answers(engine)
    with Engine(model, config, processes=True, **options) as engine:
        assert answers(engine) == computed, "tokens differ on a cold engine"
        assert engine.reset(), "vLLM's prefix cache could not be emptied"
        assert answers(engine) == cached, "tokens or hits differ from memory"
    with Engine(model, config, processes=True, **options) as engine:
        assert answers(engine) == cached, "tokens or hits differ after the restart"
        read = engine.metrics()["vllm:kv_offload_tiering_read_bytes"]
    assert read > 0, "nothing was read from disk"
    shutil.rmtree(work)
    hits = ", ".join(f"{c} of {len(p)}" for p, (_, c) in zip(prompts, cached, strict=True))
    return f"{by}: {hits} tokens cached, {read / MIB:.1f} MiB from disk"


def tiering_config(root: Path) -> tuple[dict[str, Any], str]:
    """By the registered names where the plugin is installed, else by module paths."""
    from tests.support.engine import tiering

    if any(e.name == "tiered_offload" for e in entry_points(group="vllm.general_plugins")):
        return tiering(root), "by name"
    tier = {"type": "ODirectFsTier", "module_path": "vllm_tiered_offload.fs_tier.manager"}
    module = {"spec_module_path": "vllm_tiered_offload.spec.tiering"}
    return tiering(root, tier=tier, **module), "by module path"


@dataclass(frozen=True)
class Step:
    function: Callable[[str], str]
    says: str
    seconds: int


STEPS = {
    "about": Step(about, "what this is", 60),
    "memfd": Step(memfd, "memfd region: transfers byte-exact both ways", 90),
    "shm": Step(file_in_shm, "region in /dev/shm: transfers byte-exact both ways", 60),
    "huge-pages": Step(huge_pages, "512 MiB region in huge pages", 60),
    "timing": Step(timing, "against vLLM's own region", 90),
    "restart": Step(restart, "prefix from memory, then from disk after a restart", 240),
}


def run_step(name: str, device: str) -> tuple[bool, str, float]:
    """Passed, detail, seconds. The process's output goes to a log if it fails."""
    command = [sys.executable, __file__, "--step", name, "--device", device]
    start = time.monotonic()
    with tempfile.NamedTemporaryFile("w+", suffix=f"-{name}.log", delete=False) as log:
        try:
            status = subprocess.run(
                command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, text=True,
                timeout=STEPS[name].seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, f"not done in {STEPS[name].seconds} s, see {log.name}", 0.0
        seconds = time.monotonic() - start
        last = status.stdout.strip().splitlines()[-1:] or [""]
        if status.returncode == 0 and last[0].startswith("{"):
            Path(log.name).unlink()
            return True, json.loads(last[0])["detail"], seconds
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()] or ["no output"]
    return False, f"{lines[-1]} (status {status.returncode}, see {log.name})", seconds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", nargs="*", choices=STEPS, default=list(STEPS))
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        detail = STEPS[arguments.step].function(arguments.device)
        print("\n" + json.dumps({"detail": detail}))
        return 0
    if arguments.dry_run:
        for name in arguments.only:
            print(f"{name:11} {STEPS[name].says} (at most {STEPS[name].seconds} s)")
        return 0
    return show(arguments.only, "cpu" if arguments.rehearse else "cuda")


def show(names: Sequence[str], device: str) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "result", "seconds", "detail", title=f"gpu_check on {device}")
    failed = 0
    for name in names:
        print(f"gpu_check: {name}: {STEPS[name].says}", file=sys.stderr)
        passed, detail, seconds = run_step(name, device)
        failed += not passed
        result = "passed" if passed else "FAILED"
        table.add_row(STEPS[name].says, result, f"{seconds:.0f}", escape(detail))
    Console(width=140).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
