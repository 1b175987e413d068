# SPDX-License-Identifier: Apache-2.0
"""The child process of `tests.support.engine.Engine`: one LLM, driven by lines of JSON.

Commands come in on stdin, replies go out on the descriptor named on the command
line, and stdout and stderr stay free for vLLM's log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def _generate(llm: Any, command: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=command.get("max_tokens", 8),
        temperature=0,
        ignore_eos=True,
        logprobs=1 if command.get("logprobs") else None,
    )
    prompts = []
    for tokens in command["prompts"]:
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if command.get("cache_salt"):
            prompt["cache_salt"] = command["cache_salt"]
        prompts.append(prompt)
    keywords: dict[str, Any] = {"use_tqdm": False}
    if command.get("lora"):
        from vllm.lora.request import LoRARequest

        keywords["lora_request"] = LoRARequest(*command["lora"])
    start = time.monotonic()
    outputs = llm.generate(prompts, params, **keywords)
    seconds = time.monotonic() - start
    return [_reply(output, seconds) for output in outputs]


def _reply(output: Any, seconds: float) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprob": completion.cumulative_logprob,
        "cached": output.num_cached_tokens,
        "ttft": output.metrics.first_token_latency if output.metrics else None,
        "seconds": seconds,
    }


def _metrics(llm: Any) -> list[dict[str, Any]]:
    found = []
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is None and hasattr(metric, "sum"):
            value = metric.sum
        labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
        found.append({"name": metric.name, "labels": labels, "value": value})
    return found


def _handle(llm: Any, command: dict[str, Any]) -> Any:
    operation = command["op"]
    if operation == "generate":
        return _generate(llm, command)
    if operation == "metrics":
        return _metrics(llm)
    if operation == "reset":
        return llm.reset_prefix_cache(reset_connector=command["connector"])
    if operation == "sleep":
        return llm.sleep(command["level"])
    if operation == "wake":
        return llm.wake_up()
    if operation == "stop":
        # Graceful: the engine core goes on stepping until its transfers are
        # done, so what was stored reaches the disk.
        return llm.llm_engine.engine_core.shutdown(timeout=60)
    raise ValueError(operation)


def main() -> None:
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    options = json.loads(sys.stdin.readline())
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    if options.get("kv_transfer_config"):
        options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
    if options.get("kv_events_config"):
        options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
    llm = LLM(**options)
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        command = json.loads(line)
        reply = _handle(llm, command)
        replies.write(json.dumps({"reply": reply}) + "\n")
        if command["op"] == "stop":
            break


if __name__ == "__main__":
    main()
