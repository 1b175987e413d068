# SPDX-License-Identifier: Apache-2.0
"""A closed-loop client of an OpenAI-compatible server: conversations of several turns."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True)
class Load:
    """Conversations that grow by `turn_tokens` and an answer each turn.

    Every conversation begins with the same `shared_tokens` (a system prompt); the
    turns of all conversations are interleaved, `concurrency` at a time, so that a
    conversation's KV is pushed out before its next turn.
    """

    conversations: int
    turns: int
    shared_tokens: int
    turn_tokens: int
    answer_tokens: int
    concurrency: int
    vocabulary: int = 500

    def opening(self, conversation: int) -> list[int]:
        shared = random.Random(0)
        return [shared.randrange(3, self.vocabulary) for _ in range(self.shared_tokens)]

    def question(self, conversation: int, turn: int) -> list[int]:
        source = random.Random(f"{conversation}/{turn}")
        return [source.randrange(3, self.vocabulary) for _ in range(self.turn_tokens)]


@dataclass(frozen=True)
class Answer:
    """Times are seconds; `cached` counts prompt tokens that were not computed."""

    turn: int
    first_token: float
    prompt_tokens: int
    cached: int
    tokens: tuple[int, ...]


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: list[int],
    load: Load,
    turn: int,
) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    start, first, tokens, usage = time.perf_counter(), 0.0, [], {}
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    first = first or time.perf_counter() - start
                    tokens.extend(choice["token_ids"])
            usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Answer(turn, first, len(prompt), details.get("cached_tokens") or 0, tuple(tokens))


async def _run(url: str, model: str, load: Load) -> list[Answer]:
    answers: list[Answer] = []
    limit = asyncio.Semaphore(load.concurrency)
    histories = {c: load.opening(c) for c in range(load.conversations)}
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(conversation: int, turn: int) -> None:
            async with limit:
                prompt = histories[conversation] + load.question(conversation, turn)
                answer = await _ask(session, url, model, prompt, load, turn)
                histories[conversation] = prompt + list(answer.tokens)
                answers.append(answer)

        for turn in range(load.turns):
            await asyncio.gather(*(one(c, turn) for c in range(load.conversations)))
    return answers


def run(url: str, model: str, load: Load) -> tuple[list[Answer], float]:
    """All turns of all conversations; the answers and the seconds they took together."""
    start = time.perf_counter()
    answers = asyncio.run(_run(url, model, load))
    return answers, time.perf_counter() - start
