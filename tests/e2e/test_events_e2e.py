# SPDX-License-Identifier: Apache-2.0
"""KV events of a real engine, as a router that subscribes to them sees them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.engine import Engine, prompt, tiering, wait_until
from tests.support.server import free_port

pytestmark = pytest.mark.engine

RESIDENT = "vllm:kv_offload_odirect_resident_chunks"
CHUNKS_EACH = 1500 // 128  # whole chunks of 128 tokens in each prompt
# The prompts have 88 chunks of 128 KiB: the last ones push out the first.
MAX_BYTES = "8MiB"
PROMPTS = [prompt(1500, seed=n) for n in range(8)]


class Subscriber:
    """Follows what is said to be on storage, from a thread of its own."""

    def __init__(self, port: int) -> None:
        self.known: set[Any] = set()
        self.stored: list[dict[str, Any]] = []
        self.removed = 0
        self.sequences: list[int] = []
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "kv")
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(50):
                continue
            topic, sequence, payload = self._socket.recv_multipart()
            assert topic == b"kv"
            self.sequences.append(int.from_bytes(sequence, "big"))
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event.get("medium") != "STORAGE":
            return
        hashes = {bytes(h) if isinstance(h, bytes) else h for h in event["block_hashes"]}
        if event["type"] == "BlockStored":
            self.stored.append(event)
            self.known |= hashes
        elif event["type"] == "BlockRemoved":
            assert hashes <= self.known, "removed before it was stored"
            self.known -= hashes
            self.removed += len(hashes)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def subscriber(port: int) -> Iterator[Subscriber]:
    with contextlib.closing(Subscriber(port)) as following:
        yield following


def start(model: Path, root: Path, port: int, **extra: Any) -> Engine:
    tier = {"enable_kv_events": True, "max_bytes": MAX_BYTES, "locality": "LOCAL"}
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",  # with a host name vLLM would connect, not bind
        "topic": "kv",
    }
    config = tiering(root, tier=tier, **extra)
    return Engine(model, config, processes=True, kv_events_config=events)


def agree(engine: Engine, subscriber: Subscriber) -> None:
    """What the subscriber believes is what the engine can read, once all is quiet."""

    def equal() -> bool:
        engine.generate([prompt(3)], max_tokens=1)  # events travel with engine steps
        return 0 < len(subscriber.known) == engine.metrics()[RESIDENT]

    wait_until(equal)


def test_a_subscriber_knows_what_is_on_disk(
    tiny_llama: Path, tmp_path: Path, port: int, subscriber: Subscriber
) -> None:
    with start(tiny_llama, tmp_path / "kv", port) as engine:
        engine.generate([PROMPTS[0]])
        agree(engine, subscriber)
        assert len(subscriber.known) == CHUNKS_EACH
        assert subscriber.removed == 0
        assert {event["locality"] for event in subscriber.stored} == {"LOCAL"}
        for tokens in PROMPTS[1:]:
            engine.generate([tokens])
            agree(engine, subscriber)
        assert subscriber.removed > 0
        assert 0 < len(subscriber.known) < CHUNKS_EACH * len(PROMPTS)
        assert subscriber.sequences == sorted(subscriber.sequences)


def test_self_describing_events_carry_the_tokens(
    tiny_llama: Path, tmp_path: Path, port: int, subscriber: Subscriber
) -> None:
    config = {"self_describing_kv_events": True}
    with start(tiny_llama, tmp_path / "kv", port, **config) as engine:
        for tokens in PROMPTS:
            engine.generate([tokens])
            agree(engine, subscriber)
        described = {tuple(event["token_ids"]) for event in subscriber.stored}
        for tokens in PROMPTS:
            for start_token in range(0, 128 * CHUNKS_EACH, 128):
                assert tuple(tokens[start_token : start_token + 128]) in described
        assert subscriber.removed > 0
