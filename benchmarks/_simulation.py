# SPDX-License-Identifier: Apache-2.0
"""A disk of segments without a disk: the store's eviction around the real policy.

A trace is a list of requests, a request the keys of its prompt's chunks in order. It hits the
longest run of leading keys that the cache holds; after it, all its keys are offered.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from vllm_tiered_offload.store.eviction import SecondChance

Request = Sequence[bytes]
SEGMENTS_PER_CAPACITY = 64  # a segment is this part of the root's bytes


@dataclass
class Outcome:
    """Chunks looked up, hit and written; moved are the writes that copied a hot chunk."""

    lookups: int = 0
    hits: int = 0
    writes: int = 0
    moved: int = 0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.lookups + other.lookups,
            self.hits + other.hits,
            self.writes + other.writes,
            self.moved + other.moved,
        )

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.lookups


def chunk_key(number: int) -> bytes:
    """A key as vLLM makes them: a 32-byte hash and the number of a group in 4 bytes."""
    block = xxhash.xxh3_128_digest(number.to_bytes(8, "little"))
    return block + block[::-1] + bytes(4)


def read_trace(path: Path) -> list[Request]:
    """A trace in the Mooncake format: one JSON object a line, `hash_ids` is the prompt."""
    keys: dict[int, bytes] = {}
    requests = []
    for line in path.read_text().splitlines():
        ids = json.loads(line)["hash_ids"]
        requests.append([keys.setdefault(i, chunk_key(i)) for i in ids])
    return requests


def make_conversations(requests: int, seed: int = 0) -> list[Request]:
    """Multi-turn conversations over shared system prompts, deterministic by seed.

    System prompts are of Zipf popularity, first messages of log-normal length, six of ten
    conversations end after one turn, and the time to the next turn is log-normal with a long
    tail, so that reuse is spread over all distances.
    """
    rng = random.Random(seed)
    fresh = _count_keys()
    systems = [_take(fresh, 1 + int(rng.expovariate(1 / 6))) for _ in range(200)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    trace: list[Request] = []
    waiting: list[tuple[float, int, list[bytes], int]] = []
    started, arrival = 0, 0.0
    while len(trace) < requests:
        if not waiting or arrival < waiting[0][0]:
            message = _take(fresh, 1 + min(250, int(rng.lognormvariate(2.0, 1.2))))
            turns = 1 if rng.random() < 0.6 else 1 + int(rng.expovariate(1 / 4))
            prompt = rng.choices(systems, weights)[0] + message
            heapq.heappush(waiting, (arrival, started, prompt, turns))
            started += 1
            arrival += rng.expovariate(1.0)
            continue
        now, name, prompt, turns = heapq.heappop(waiting)
        trace.append(prompt)
        if turns > 1:
            longer = prompt + _take(fresh, 1 + int(rng.expovariate(1 / 3)))
            later = now + rng.lognormvariate(5.0, 1.3)
            heapq.heappush(waiting, (later, name, longer, turns - 1))
    return trace


def _count_keys() -> Iterator[bytes]:
    number = 0
    while True:
        yield chunk_key(number)
        number += 1


def _take(keys: Iterator[bytes], count: int) -> list[bytes]:
    return [next(keys) for _ in range(count)]


def distinct_chunks(trace: Sequence[Request]) -> int:
    return len({key for request in trace for key in request})


def replay_lru(trace: Sequence[Request], capacity: int) -> Outcome:
    """Exact least-recently-used by chunk: what the log of segments is measured against."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    outcome = Outcome()
    for request in trace:
        outcome.lookups += len(request)
        outcome.hits += _leading(request, cache)
        for key in request:
            if key in cache:
                cache.move_to_end(key)
            else:
                cache[key] = None
                outcome.writes += 1
        while len(cache) > capacity:
            cache.popitem(last=False)
    return outcome


def _leading(request: Request, held: object) -> int:
    for count, key in enumerate(request):
        if key not in held:  # type: ignore[operator]
            return count
    return len(request)


class SimulatedDisk:
    """Slots of equal segments: filled front to back, evicted oldest first.

    As on a real root, one slot's worth of bytes goes to the overhead of the others, one slot
    is kept free, and the open segment is part of the bytes: the policy gets no capacity that
    the store would not have. When a segment is opened in the last slot but one, the oldest
    goes, and what the policy picks out of it is moved into the new one.
    """

    def __init__(self, capacity: int, policy: SecondChance) -> None:
        self.policy = policy
        self.outcome = Outcome()
        self._segment_chunks = max(1, capacity // SEGMENTS_PER_CAPACITY)
        self._most_segments = SEGMENTS_PER_CAPACITY - 2
        self._index: dict[bytes, list[bytes]] = {}
        self._sealed: deque[list[bytes]] = deque()
        self._open: list[bytes] = []

    @property
    def held_chunks(self) -> int:
        return sum(map(len, self._sealed)) + len(self._open)

    def serve(self, request: Request) -> None:
        """One request: look up its prefix, then store what was not held."""
        held = _leading(request, self._index)
        self.outcome.lookups += len(request)
        self.outcome.hits += held
        for key in request[:held]:
            self.policy.on_hit(key)
        for key in request[held:]:
            if key in self._index:
                self.policy.on_hit(key)
            else:
                self._write(key)
                self.policy.on_stored(1)

    def _write(self, key: bytes) -> None:
        while len(self._open) == self._segment_chunks:
            self._sealed.append(self._open)
            self._open = []
            if len(self._sealed) == self._most_segments:
                self._evict(self._sealed.popleft())
        self._open.append(key)
        self._index[key] = self._open
        self.outcome.writes += 1

    def _evict(self, victim: list[bytes]) -> None:
        moved = self.policy.choose_copies(self._placed_in(victim))
        for key in moved:
            self._write(key)
        self.policy.on_moved(moved)
        self.outcome.moved += len(moved)
        gone = self._placed_in(victim)
        for key in gone:
            del self._index[key]
        self.policy.on_evicted(gone)

    def _placed_in(self, segment: list[bytes]) -> list[bytes]:
        return [key for key in segment if self._index.get(key) is segment]


def replay_segments(
    trace: Sequence[Request], capacity: int, policy: SecondChance | None = None
) -> Outcome:
    """The trace through the real policy, deterministic: keys are hashed the same everywhere."""
    if policy is None:
        policy = SecondChance(capacity, digest=xxhash.xxh3_64_intdigest)
    disk = SimulatedDisk(capacity, policy)
    for request in trace:
        disk.serve(request)
    return disk.outcome
