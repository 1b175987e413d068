# SPDX-License-Identifier: Apache-2.0
"""`/metrics` of a real server with two front ends, held against the files on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine import prompt, tiering, wait_until
from tests.support.server import Server

pytestmark = pytest.mark.engine

PREFIX = "vllm:kv_offload_odirect_"
POOL = "vllm:kv_offload_pool_"
TIER = "1:odirect_fs"
PROMPTS = [prompt(1000, seed=1), prompt(1500, seed=2)]
CHUNKS = 1000 // 128 + 1500 // 128  # whole chunks of 128 tokens, vLLM's block on CPUs
MAX_BYTES = 256 << 20
POOL_BYTES = 64 << 20


class Scrape:
    """One answer of `/metrics`."""

    def __init__(self, server: Server) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(server.get("/metrics"))
        self.samples = [sample for family in families for sample in family.samples]

    def values(self, name: str, **labels: str) -> set[float]:
        """The values of all series of that name whose labels include these."""
        return {
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }

    def counter(self, name: str, **labels: str) -> float:
        (value,) = self.values(f"{PREFIX}{name}_total", **labels)
        return value

    def gauges(self, name: str, **labels: str) -> set[float]:
        """Each front end (label `pid`) shows what it was told last, and vLLM tells one of
        them at each step: the present value is among these."""
        values = self.values(PREFIX + name, **labels)
        assert values, name
        return values

    def gauge(self, name: str, **labels: str) -> float:
        """A gauge that has only grown so far."""
        return max(self.gauges(name, **labels))


def start(model: Path, root: Path, scratch: Path) -> Server:
    scratch.mkdir()
    config = json.dumps(tiering(root, tier={"max_bytes": MAX_BYTES}))
    arguments = ["--api-server-count", "2", "--kv-transfer-config", config]
    return Server(model, arguments, scratch=scratch)


def settled(server: Server, condition: Callable[[Scrape], bool]) -> Scrape:
    """The first scrape that fulfils the condition; gauges move with engine steps only."""

    def holds() -> bool:
        server.complete(prompt(3), max_tokens=1)
        return condition(Scrape(server))

    wait_until(holds, seconds=60)
    return Scrape(server)


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("segments/*.seg"))


def test_what_is_scraped_is_what_is_on_disk(tiny_llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with start(tiny_llama, root, tmp_path / "first") as server:
        server.complete(prompt(3), max_tokens=1)
        _every_series_is_there(server, root)
        for tokens in PROMPTS:
            server.complete(tokens)
        scrape = settled(server, lambda s: s.counter("stored_chunks") == CHUNKS)
        _agrees_with_the_files(scrape, root)
        assert scrape.counter("loaded_chunks") == 0
    with start(tiny_llama, root, tmp_path / "second") as server:
        server.complete(PROMPTS[0])
        loaded = 1000 // 128
        scrape = settled(server, lambda s: s.counter("loaded_chunks") == loaded)
        assert scrape.gauge("recovery_chunks", root=str(root)) == CHUNKS
        assert scrape.gauge("recovery_seconds", root=str(root)) > 0
        assert scrape.counter("stored_chunks") == 0
        assert scrape.counter("loaded_bytes") <= scrape.counter("read_bytes")
        theirs = scrape.values("vllm:kv_offload_tiering_read_bytes_total", tier=TIER)
        assert theirs == {scrape.counter("loaded_bytes")}
        cached = scrape.values("vllm:prompt_tokens_cached_by_source_total", source="disk")
        assert cached in ({loaded * 128.0}, set())  # set(): before vLLM 0.32
        assert 0 in scrape.values(POOL + "pinned_bytes")  # the request has started
        assert scrape.values(POOL + "waits_total") == {0}  # there was room


def _every_series_is_there(server: Server, root: Path) -> None:
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata

    from vllm_tiered_offload import pool_metrics
    from vllm_tiered_offload.fs_tier.metrics import metric_definitions

    scrape = Scrape(server)
    for name, metadata in {**metric_definitions(), **pool_metrics.metric_definitions()}.items():
        suffix = "_total" if isinstance(metadata, OffloadingCounterMetadata) else ""
        labels = {"tier": TIER} if name.startswith(PREFIX) else {}
        if name != PREFIX + "failed_chunks":  # has no reason yet
            assert scrape.values(name + suffix, **labels), name
    for name in ("pinned_bytes", "promoting_bytes", "overdue_bytes", "waiting_requests"):
        assert scrape.values(POOL + name) == {0}, name
    for name in ("waits_total", "wait_seconds_total", "pins_expired_total"):
        assert scrape.values(POOL + name) == {0}, name
    (limit,) = scrape.values(POOL + "promotion_limit_bytes")
    assert 0 < limit <= POOL_BYTES
    for errno_name in ("EIO", "ENOSPC"):
        labels = {"direction": "write", "errno": errno_name, "root": str(root)}
        assert scrape.counter("io_errors", **labels) == 0


def _agrees_with_the_files(scrape: Scrape, root: Path) -> None:
    here = {"root": str(root)}
    files = segments(root)
    sizes = [path.stat().st_size for path in files]
    assert scrape.gauge("resident_bytes", **here) == sum(sizes)
    allocated = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    assert allocated <= MAX_BYTES
    assert sum(sizes) <= scrape.gauge("capacity_bytes", **here) <= MAX_BYTES
    assert scrape.gauge("resident_chunks", **here) == CHUNKS
    stored = scrape.counter("stored_bytes")
    assert stored % CHUNKS == 0
    written = scrape.counter("written_bytes", **here)
    assert stored < written <= sum(sizes)
    theirs = scrape.values("vllm:kv_offload_tiering_write_bytes_total", tier=TIER)
    assert theirs == {stored}
    space = os.statvfs(root)
    total = space.f_blocks * space.f_frsize
    free = space.f_bavail * space.f_frsize
    assert abs(scrape.gauge("free_bytes", **here) - free) < total / 10
    assert 0 in scrape.gauges("queue_jobs")
    assert 0 in scrape.gauges("queue_bytes")
    for name in ("stalled", "stores_paused", "stores_never_hit", "pad_bytes"):
        assert scrape.gauges(name) == {0}, name
    direct = scrape.gauges("direct_io", direction="write")
    assert direct == scrape.gauges("direct_io", direction="read")
    assert len(direct) == 1
