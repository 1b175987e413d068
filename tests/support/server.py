# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.engine import CPU_ENV, REPOSITORY, EngineError

START_SECONDS = 300.0


def stub_distribution(directory: Path) -> Path:
    """A folder for PYTHONPATH in which a distribution named `vllm` is found.

    The `vllm` command asks for its own distribution's version, and the CPU
    wheel's distribution has another name. vLLM reads the platform from the
    version, which therefore names the CPU.
    """
    info = directory / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`vllm serve MODEL ...` on a port of its own; a context manager."""

    def __init__(
        self,
        model: Path,
        arguments: list[str],
        *,
        scratch: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self._log = scratch / "server.log"
        path = os.pathsep.join([str(stub_distribution(scratch / "stub")), str(REPOSITORY)])
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        command += ["--max-model-len", "4096", "--dtype", "bfloat16", *arguments]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **CPU_ENV, "PYTHONPATH": path, **(env or {})},
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def complete(self, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
        """The response of `/v1/completions` for token ids, greedy."""
        body = {
            "model": json.loads(self.get("/v1/models"))["data"][0]["id"],
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return dict(json.loads(self.post("/v1/completions", body)))

    def metrics(self) -> dict[str, float]:
        """`/metrics`, summed over labels, by sample name."""
        totals: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name = line.split("{")[0].split(" ")[0]
                totals[name] = totals.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return totals

    def get(self, path: str) -> str:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.port}{path}", timeout=120
        ) as reply:
            return str(reply.read().decode())

    def post(self, path: str, body: Any) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return str(reply.read().decode())

    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = 60.0) -> None:
        """Send `how` to the server's main process and wait; then kill what is left."""
        if self.process.poll() is None:
            os.kill(self.process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(self.log.splitlines()[-80:])
                raise EngineError(f"vllm serve: exit status {self.process.poll()}\n{tail}")
            time.sleep(0.5)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
