# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a `--kv-transfer-config`: one line for every key."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_tiered_offload.cli.checks import Check, fail, ok, warn
from vllm_tiered_offload.config import ConfigError, Transfer


def check_configuration(transfer: Transfer) -> Iterator[Check]:
    """All problems, then all doubts; one line if there are none."""
    for problem in transfer.problems:
        yield fail(problem.key, *_found_and_advice(problem))
    for doubt in transfer.doubts:
        yield warn(doubt.key, *_found_and_advice(doubt))
    if not transfer.problems and not transfer.doubts:
        yield ok("keys", f"all are right; {len(transfer.tiers)} odirect_fs tier(s)")


def _found_and_advice(error: ConfigError) -> tuple[str, str]:
    """The last part of the line says what would be right."""
    found, _, advice = error.problem.rpartition("; ")
    return (found, advice) if found else (advice, "correct it; vLLM would stop with this line")
