# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for tests: one engine a child process, driven synchronously."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0

# Equal thread counts with and without a connector: vLLM reserves one more core
# a rank for a connector, and another number of threads changes the last digits.
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Output:
    """One finished request: `cached` counts prompt tokens that were not computed."""

    tokens: list[int]
    logprob: float | None
    cached: int
    ttft: float | None
    seconds: float


class EngineError(RuntimeError):
    """The engine's process ended or answered nothing; carries the end of its log."""


class Engine:
    """A running `vllm.LLM`. Use as a context manager; leaving it stops gracefully.

    By default scheduler and worker live in one child process, which starts in
    ten seconds; `processes=True` gives them processes of their own, as in
    production, and takes thirty. With `tensor_parallel_size` above 1 vLLM needs
    the processes.
    """

    def __init__(
        self,
        model: Path,
        kv_transfer_config: Mapping[str, Any] | None = None,
        *,
        processes: bool = False,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        **options: Any,
    ) -> None:
        separate = processes or options.get("tensor_parallel_size", 1) > 1
        layout = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate else "0"}
        self._log = log or Path(tempfile.mkstemp(prefix="engine-", suffix=".log")[1])
        read, write = os.pipe()
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.engine_process", str(write)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                cwd=REPOSITORY,
                env={**os.environ, **CPU_ENV, **layout, **(env or {})},
                start_new_session=True,
                text=True,
            )
        os.close(write)
        self._replies = os.fdopen(read)
        settings = {
            "model": str(model),
            "enforce_eager": True,
            "max_model_len": 4096,
            "dtype": "bfloat16",
            "disable_log_stats": False,
            **options,
        }
        if kv_transfer_config is not None:
            settings["kv_transfer_config"] = dict(kv_transfer_config)
        try:
            self._send(settings)
            self._receive(START_SECONDS)
        except BaseException:
            self.kill()
            raise

    @property
    def log(self) -> str:
        """Everything that the engine's processes have printed so far."""
        return self._log.read_text(errors="replace")

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Output]:
        """Greedy tokens for token-id prompts, in order (`max_tokens`, `cache_salt`, ...)."""
        reply = self._ask("generate", prompts=[list(p) for p in prompts], **sampling)
        return [Output(**output) for output in reply]

    def reset(self, *, connector: bool = False) -> bool:
        """Empty vLLM's prefix cache, and the connector's tiers too if asked."""
        return bool(self._ask("reset", connector=connector))

    def metrics(self) -> dict[str, float]:
        """Values by metric name, summed over labels (histograms: their sum)."""
        totals: dict[str, float] = {}
        for metric in self._ask("metrics"):
            if metric["value"] is not None:
                name = metric["name"]
                totals[name] = totals.get(name, 0.0) + float(metric["value"])
        return totals

    def labelled_metrics(self) -> list[dict[str, Any]]:
        return list(self._ask("metrics"))

    def call(self, operation: str, **arguments: Any) -> Any:
        """Any other operation of `engine_process` (`sleep`, `wake`)."""
        return self._ask(operation, **arguments)

    def stop(self) -> None:
        """Stop after all transfers are done; idempotent."""
        if self.process.poll() is None:
            with contextlib.suppress(EngineError, BrokenPipeError):
                self._ask("stop")
        self.kill(grace=30.0)

    def kill(self, grace: float = 0.0) -> None:
        """Wait `grace` seconds, then kill the whole process group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._replies.close()
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def _ask(self, operation: str, **arguments: Any) -> Any:
        self._send({"op": operation, **arguments})
        return self._receive(600.0)["reply"]

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _receive(self, seconds: float) -> Any:
        import select

        deadline = time.monotonic() + seconds
        while not select.select([self._replies], [], [], 1.0)[0]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(self._failure())
        line = self._replies.readline()
        if not line:
            raise EngineError(self._failure())
        return json.loads(line)

    def _failure(self) -> str:
        tail = "\n".join(self.log.splitlines()[-80:])
        return f"engine process: exit status {self.process.poll()}\n{tail}"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def tiering(
    root: Path | str | None,
    *,
    cpu_bytes: int | str = "64MiB",
    connector: str = "OffloadingConnector",
    tier: Mapping[str, Any] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """A `kv_transfer_config` with our spec and, unless `root` is None, our tier."""
    config: dict[str, Any] = {"cpu_bytes_to_use": cpu_bytes, **extra}
    if connector == "OffloadingConnector":
        config.setdefault("spec_name", "AlignedTieringOffloadingSpec")
    if root is not None:
        entry = {
            "type": "odirect_fs",
            "root_dir": str(root),
            "max_bytes": "1GiB",
            **(tier or {}),
        }
        config["secondary_tiers"] = [entry]
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": config,
    }


def prompt(length: int, *, seed: int = 0, vocabulary: int = 500) -> list[int]:
    """`length` token ids that differ with `seed`."""
    source = random.Random(seed)
    return [source.randrange(3, vocabulary) for _ in range(length)]


def wait_until(condition: Any, seconds: float = 20.0, interval: float = 0.05) -> None:
    """Poll `condition()` until it is true; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s: {condition}"
        time.sleep(interval)
