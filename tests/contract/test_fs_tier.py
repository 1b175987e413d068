# SPDX-License-Identifier: Apache-2.0
"""The tier over the real store and a real directory: page-aligned tensors, no region."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult

from tests.support import tier as support
from tests.support.tier import PAGE, finished, job, key, make_config, make_spec
from vllm_tiered_offload.fs_tier import manager
from vllm_tiered_offload.fs_tier.manager import ODirectFsTier

HIT, MISS = LookupResult.HIT, LookupResult.MISS
MIB = 1 << 20
CHUNK = 4 * PAGE
CHUNKS = 48


def _page_aligned_zero_tensor(chunks: int, chunk_bytes: int) -> torch.Tensor:
    """(chunks, chunk_bytes) of int8 zeros whose first byte starts a page."""
    raw = np.zeros(chunks * chunk_bytes + PAGE, dtype=np.int8)
    start = -raw.ctypes.data % PAGE
    tensor = torch.from_numpy(raw[start : start + chunks * chunk_bytes])
    assert tensor.data_ptr() % PAGE == 0
    return tensor.view(chunks, chunk_bytes)


def _page_aligned_rand_tensor(chunks: int, chunk_bytes: int, seed: int = 0) -> torch.Tensor:
    """As the zero tensor, with bytes that differ in every chunk."""
    tensor = _page_aligned_zero_tensor(chunks, chunk_bytes)
    generator = torch.Generator().manual_seed(seed)
    tensor.random_(-128, 128, generator=generator)
    return tensor


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ODirectFsTier]]:
    made: list[ODirectFsTier] = []

    def build(tensor: torch.Tensor, *, spec: Any | None = None, **keys: Any) -> ODirectFsTier:
        keys.setdefault("root_dir", str(tmp_path / "kv"))
        keys.setdefault("cache_namespace", "test")
        keys.setdefault("max_bytes", 64 * MIB)
        spec = spec or make_spec(make_config(page=tensor.shape[1]))
        tier = ODirectFsTier(
            offloading_spec=spec,
            primary_kv_view=_view(tensor),
            tier_type="odirect_fs",
            **keys,
        )
        made.append(tier)
        return tier

    yield build
    for tier in made:
        tier.shutdown()


def store(tier: ODirectFsTier, numbers: range, job_id: int = 0) -> None:
    """Row n under key n, for all n; waits until it is on disk."""
    request = support.request(f"store-{job_id}", {key(n): n + 1 for n in numbers})
    keys = {key(n): n for n in numbers}
    support.announce(tier, request, keys)
    as_set = set(keys)
    tier.submit_store(job(job_id, as_set, [keys[k] for k in as_set], context=request))
    assert finished(tier, 1)[job_id].success
    tier.on_request_finished(request)


def load(tier: ODirectFsTier, rows: dict[int, int], job_id: int = 1000) -> Any:
    """Key n into row rows[n]."""
    tier.submit_load(job(job_id, [key(n) for n in rows], list(rows.values()), load=True))
    return finished(tier, 1)[job_id]


def hits(tier: ODirectFsTier, numbers: range) -> list[int]:
    request = support.request()
    return [n for n in numbers if tier.lookup(key(n), request) is HIT]


def test_chunks_come_back_into_other_rows_after_a_restart(make: Any) -> None:
    numbers = range(CHUNKS)
    first = _page_aligned_rand_tensor(CHUNKS, CHUNK)
    tier = make(first)
    assert hits(tier, numbers) == []
    store(tier, numbers)
    assert hits(tier, numbers) == list(numbers)
    tier.shutdown()

    second = _page_aligned_zero_tensor(CHUNKS, CHUNK)
    tier = make(second)
    assert hits(tier, numbers) == list(numbers)
    rows = {n: CHUNKS - 1 - n for n in numbers}
    result = load(tier, rows)
    assert result.success
    support.assert_moved(result, CHUNKS * CHUNK)
    assert result.transfer_time > 0
    assert torch.equal(second.flip(0), first)


def test_the_start_up_lines_describe_the_real_store(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(manager.logger, "info", lambda text, *args: said.append(text % args))
    roots = [str(tmp_path / "a"), str(tmp_path / "b")]
    make(_page_aligned_zero_tensor(4, CHUNK), root_dir=roots, direct_io="off")
    (banner,) = said
    first, *others = banner.splitlines()
    assert "chunks of 16KiB" in first
    for line, root in zip(others, roots, strict=True):
        assert line.startswith(f"  {root}: ")
        assert "buffered I/O (direct_io is 'off')" in line
        assert "at most 64MiB" in line
        assert "0 chunks found" in line


def test_chunks_lie_on_disk_in_prefix_order(make: Any, tmp_path: Path) -> None:
    tensor = _page_aligned_rand_tensor(CHUNKS, CHUNK)
    tier = make(tensor)
    store(tier, range(CHUNKS))
    tier.shutdown()
    content = b"".join(p.read_bytes() for p in sorted(tmp_path.glob("kv/segments/*.seg")))
    places = [content.find(bytes(tensor[n].numpy().tobytes())) for n in range(CHUNKS)]
    assert min(places) >= 0
    assert places == sorted(places)


def test_a_damaged_chunk_is_lost_alone_and_stays_a_miss(make: Any, tmp_path: Path) -> None:
    source = _page_aligned_rand_tensor(8, CHUNK)
    tier = make(source)
    store(tier, range(8))
    tier.shutdown()
    _flip_byte_of(bytes(source[3].numpy().tobytes()), tmp_path)

    target = _page_aligned_zero_tensor(8, CHUNK)
    tier = make(target)
    assert hits(tier, range(8)) == list(range(8))
    result = load(tier, {n: n for n in range(8)})
    assert not result.success
    assert set(result.successful_keys) == {key(n) for n in range(8) if n != 3}
    for n in set(range(8)) - {3}:
        assert torch.equal(target[n], source[n])
    assert hits(tier, range(8)) == [0, 1, 2, 4, 5, 6, 7]
    # What was computed again is stored again and served again.
    target.copy_(source)
    store(tier, range(3, 4), job_id=1)
    assert hits(tier, range(3, 4)) == [3]
    target.zero_()
    assert load(tier, {3: 0}, job_id=1001).success
    assert torch.equal(target[0], source[3])


def _flip_byte_of(chunk: bytes, tmp_path: Path) -> None:
    for path in tmp_path.glob("kv/segments/*.seg"):
        at = path.read_bytes().find(chunk)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(chunk) // 2)
                byte = file.read(1)[0] ^ 0x40
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte]))
            return
    raise AssertionError("the chunk is not on disk")


def test_namespaces_on_one_root_do_not_meet(make: Any) -> None:
    tensor = _page_aligned_rand_tensor(4, CHUNK)
    one, two = make(tensor, cache_namespace="one"), make(tensor, cache_namespace="two")
    store(one, range(4))
    assert hits(one, range(4)) == list(range(4))
    assert hits(two, range(4)) == []


def test_without_a_name_nothing_outlives_the_process(make: Any) -> None:
    tensor = _page_aligned_rand_tensor(4, CHUNK)
    tier = make(tensor, cache_namespace=None)
    store(tier, range(4))
    assert hits(tier, range(4)) == list(range(4))
    tier.shutdown()
    assert hits(make(tensor, cache_namespace=None), range(4)) == []


def test_a_reset_forgets_on_disk_too(make: Any) -> None:
    tensor = _page_aligned_rand_tensor(8, CHUNK)
    tier = make(tensor)
    store(tier, range(4))
    tier.drain_jobs()
    assert hits(tier, range(8)) == []
    store(tier, range(4, 8), job_id=1)
    assert hits(tier, range(8)) == [4, 5, 6, 7]
    tier.shutdown()
    # The next process finds what was stored before the reset, never what came after it.
    assert hits(make(tensor), range(8)) == [0, 1, 2, 3]


def test_drain_waits_for_every_job_and_loses_none(make: Any) -> None:
    tensor = _page_aligned_rand_tensor(CHUNKS, CHUNK)
    tier = make(tensor, on_reset="keep")
    for n in range(CHUNKS):
        tier.submit_store(job(n, [key(n)], [n]))
    tier.drain_jobs()
    assert len(list(tier.get_finished_jobs())) == CHUNKS
    assert not tier.has_pending_work()
    assert hits(tier, range(CHUNKS)) == list(range(CHUNKS))


def test_the_bound_holds_and_what_left_is_announced(make: Any, tmp_path: Path) -> None:
    bound = 4 * MIB
    rows, rounds = 16, 40
    tensor = _page_aligned_rand_tensor(rows, CHUNK)
    spec = make_spec(make_config(page=CHUNK, events=True))
    tier = make(tensor, spec=spec, max_bytes=bound, enable_kv_events=True)
    known: set[bytes] = set()
    for r in range(rounds):
        request = support.request(f"r{r}")
        tier.on_new_request(request)
        keys = [key(rows * r + n) for n in range(rows)]
        tier.submit_store(job(r, keys, range(rows), context=request))
        finished(tier, 1)
        on_disk = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*") if p.is_file())
        assert on_disk <= bound
        _apply(tier, known)
    everything = range(rows * rounds)
    readable = {key(n) for n in hits(tier, everything)}
    _apply(tier, known)
    assert readable == known
    assert 0 < len(readable) < rows * rounds


def _apply(tier: ODirectFsTier, known: set[bytes]) -> None:
    for event in tier.take_events():
        if event.removed:
            known.difference_update(event.keys)
        else:
            known.update(event.keys)


def test_read_mode_serves_and_never_writes(make: Any, tmp_path: Path) -> None:
    tensor = _page_aligned_rand_tensor(8, CHUNK)
    writer = make(tensor)
    store(writer, range(4))
    writer.shutdown()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    reader = make(tensor, mode="read")
    assert hits(reader, range(8)) == [0, 1, 2, 3]
    reader.submit_store(job(0, [key(5)], [5]))
    result = finished(reader, 1)[0]
    assert result.success
    support.assert_moved(result, 0)
    assert load(reader, {0: 7}).success
    assert torch.equal(tensor[7], tensor[0])
    reader.shutdown()
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_two_directories_share_the_load_and_both_are_found_again(
    make: Any, tmp_path: Path
) -> None:
    tensor = _page_aligned_rand_tensor(CHUNKS, CHUNK)
    roots = [str(tmp_path / "a"), str(tmp_path / "b")]
    tier = make(tensor, root_dir=roots)
    for n in range(CHUNKS):
        store(tier, range(n, n + 1), job_id=n)
    tier.shutdown()
    assert all(list(Path(root).glob("segments/*.seg")) for root in roots)
    assert hits(make(tensor, root_dir=roots), range(CHUNKS)) == list(range(CHUNKS))


def test_jobs_of_many_steps_overlap_and_every_one_is_reported_once(make: Any) -> None:
    tensor = _page_aligned_rand_tensor(CHUNKS, CHUNK)
    original = tensor.clone()
    tier = make(tensor)
    for n in range(CHUNKS):
        tier.submit_store(job(n, [key(n)], [n]))
    assert all(r.success for r in finished(tier, CHUNKS).values())
    tensor.zero_()
    for n in range(CHUNKS):
        tier.submit_load(job(CHUNKS + n, [key(n)], [n], load=True))
    assert all(r.success for r in finished(tier, CHUNKS).values())
    assert torch.equal(tensor, original)
