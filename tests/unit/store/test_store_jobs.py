# SPDX-License-Identifier: Apache-2.0
"""The facade's contract: every job reported once, right bytes or none."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from harness import CHUNK, FINGERPRINT, KIB, MIB, Engine, keys, payload, segments, wait_for

from vllm_tiered_offload.store import (
    ChunkStore,
    Namespace,
    StoreError,
    StoreSettings,
    faults,
)
from vllm_tiered_offload.store.syscalls import Syscalls

OTHER = Namespace("f" * 32, {}, private=True)


def test_what_was_stored_comes_back(root: Path) -> None:
    wanted = keys(100)
    with Engine(root) as engine:
        assert all(done.ok for done in engine.put(wanted))
        assert engine.held(wanted) == wanted
        assert engine.get(wanted) == wanted


def test_each_job_is_reported_once(root: Path) -> None:
    with Engine(root, rows=40) as engine:
        jobs = [engine.start_store(keys(4, 4 * n), 4 * n) for n in range(10)]
        engine.store.drain()
        done = engine.store.take_completions()
        assert sorted(each.job_id for each in done) == jobs
        assert [each.bytes for each in done] == [4 * CHUNK] * 10
        assert engine.store.take_completions() == []
        assert engine.store.pending_jobs == 0


def test_jobs_without_chunks_complete(root: Path) -> None:
    with Engine(root) as engine:
        engine.store.submit_store(1, [], [])
        engine.store.submit_load(2, [], [])
        assert [(d.job_id, d.ok, d.bytes) for d in engine.finish()] == [
            (1, True, 0),
            (2, True, 0),
        ]


def test_small_jobs_that_wait_share_a_write(root: Path) -> None:
    class CountingCalls(Syscalls):
        writes = 0

        def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            self.writes += 1
            return super().pwritev(fd, buffers, offset)

    calls = CountingCalls()
    with Engine(root, rows=60, syscalls=calls) as engine:
        faults.arm("segment.before_write=sleep:0.2")
        engine.start_store(keys(1), 0)  # occupies the writer
        wait_for(lambda: engine.store.stats().queued_store_bytes)
        before = calls.writes
        for n in range(1, 41):
            engine.start_store(keys(1, n), n)
        engine.finish()
        assert calls.writes - before <= 4
        faults.arm("")
        assert engine.get(keys(41)) == keys(41)


def test_chunks_lie_in_the_order_they_were_given(root: Path) -> None:
    wanted = keys(50)
    with Engine(root) as engine:
        engine.put(wanted)
        index = engine.store._index
        places = [index.places[key] for key in wanted]
        assert places == sorted(places)


def test_neighbours_are_read_with_one_call(root: Path) -> None:
    class CountingCalls(Syscalls):
        sizes: list[int] = []

        def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            self.sizes.append(sum(map(len, buffers)))
            return super().preadv(fd, buffers, offset)

    calls = CountingCalls()
    with Engine(root, syscalls=calls, read_threads=1, io_bytes=4 * MIB) as engine:
        wanted = keys(60)
        engine.put(wanted)
        calls.sizes.clear()
        assert engine.get(wanted[::-1]) == wanted[::-1]  # rows in any order
        assert max(calls.sizes) >= 60 * CHUNK


def test_chunks_held_or_on_their_way_are_not_written_again(root: Path) -> None:
    wanted = keys(30)
    with Engine(root, rows=90) as engine:
        engine.start_store(wanted, 0)
        engine.start_store(wanted, 30)
        engine.finish()
        engine.start_store(wanted, 60)
        (again,) = engine.finish()
        assert again.ok
        assert again.bytes == 0
        assert engine.store.stats().stored_chunks == 30


def test_load_of_an_unknown_chunk_fails_alone(root: Path) -> None:
    wanted = keys(10)
    with Engine(root) as engine:
        engine.put(wanted)
        engine.start_load([*wanted, *keys(1, 99)])
        (done,) = engine.finish()
        assert not done.ok
        assert sorted(done.loaded_keys or ()) == sorted(wanted)
        assert keys(1, 99)[0].hex() in (done.error or "")
        assert engine.store.stats().failed_chunks == {"unknown": 1}


@pytest.mark.parametrize("chunk_bytes", [4 * KIB, 3_098_112, 1 * MIB, 5000])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_chunk_sizes(root: Path, chunk_bytes: int, direct_io: str) -> None:
    """3 098 112 is no multiple of a page but of a sector; 5000 is of neither."""
    wanted = keys(20)
    settings = {"direct_io": direct_io, "max_bytes": 256 * MIB, "io_bytes": 8 * MIB}
    with Engine(root, chunk_bytes=chunk_bytes, rows=20, **settings) as engine:
        engine.put(wanted)
        assert engine.get(wanted) == wanted
    with Engine(root, chunk_bytes=chunk_bytes, rows=20, **settings) as engine:
        assert engine.get(wanted[::2]) == wanted[::2]


@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_page_sizes(root: Path, page_bytes: int) -> None:
    wanted = keys(50)
    with Engine(root, page_bytes=page_bytes) as engine:
        engine.put(wanted)
        assert engine.get(wanted) == wanted
    with Engine(root, page_bytes=4096) as engine:  # root.json decides
        assert engine.store.describe()["roots"][0]["page_bytes"] == page_bytes  # type: ignore[index]
        assert engine.get(wanted) == wanted


def test_keys_of_other_lengths(root: Path) -> None:
    wanted = [b"ab", b"c" * 36, b"d" * 64, b"e" * 4]
    with Engine(root) as engine:
        engine.put(wanted)
    with Engine(root) as engine:
        assert engine.get(wanted) == wanted


def test_events_mirror_the_index(root: Path) -> None:
    wanted = keys(10)
    with Engine(root, events=True) as engine:
        engine.put(wanted)
        engine.store._index.discard(engine.store._index.segments[0], 3)
        events = engine.store.take_events()
        assert [event.removed for event in events] == [False, True]
        assert events[0].keys == tuple(wanted)
        assert events[1].keys == (wanted[3],)
        assert engine.store.take_events() == []
    with Engine(root, events=True) as engine:
        assert engine.store.take_events() == []  # what was there before is no news


def test_no_events_unless_asked_for(root: Path) -> None:
    with Engine(root) as engine:
        engine.put(keys(5))
        assert engine.store.take_events() == []


def test_other_namespace_sees_nothing(root: Path) -> None:
    wanted = keys(10)
    with Engine(root) as engine:
        engine.put(wanted)
    with Engine(root, namespace=OTHER) as engine:
        assert engine.held(wanted) == []


def test_switch_of_namespace_forgets_and_goes_on(root: Path) -> None:
    old, new = keys(20), keys(20, 100)
    with Engine(root) as engine:
        engine.put(old)
        engine.store.drain()
        engine.store.switch_namespace(OTHER)
        assert engine.held(old) == []
        engine.put(new)
        assert engine.get(new) == new
        wait_for(lambda: engine.store.stats().chunks == 20, 1)
        engine.store.switch_namespace(Namespace(FINGERPRINT))
        assert engine.get(old) == old
        assert engine.held(new) == []


def test_switch_with_jobs_in_flight_is_refused(root: Path) -> None:
    with Engine(root) as engine:
        faults.arm("segment.before_write=sleep:0.3")
        engine.start_store(keys(3))
        with pytest.raises(StoreError, match="drain"):
            engine.store.switch_namespace(OTHER)
        engine.store.drain()


def test_stores_rotate_over_roots_and_come_back_from_all(tmp_path: Path) -> None:
    roots = (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    wanted = keys(300)
    with Engine(*roots, io_bytes=128 * KIB) as engine:
        engine.put(wanted)
        assert all(stats.chunks > 50 for stats in engine.store.stats().roots)
        assert engine.get(wanted) == wanted
    with Engine(*roots) as engine:
        assert engine.get(wanted) == wanted


def test_read_mode_serves_and_changes_nothing(root: Path) -> None:
    wanted = keys(30)
    with Engine(root) as engine:
        engine.put(wanted)

    def everything() -> list[tuple[str, int, int]]:
        found = [(str(p), p.lstat().st_mtime_ns, p.lstat().st_size) for p in root.rglob("*")]
        return sorted(found)

    before = everything()
    with Engine(root, mode="read") as engine:
        assert engine.get(wanted) == wanted
        (done,) = engine.put(keys(5, 100))
        assert done.ok
        assert done.bytes == 0
        assert engine.store.stats().dropped_chunks == {"read_mode": 5}
    assert everything() == before


def test_read_mode_waits_for_a_root_to_come(root: Path) -> None:
    root.mkdir()
    with Engine(root, mode="read") as reader:
        assert reader.held(keys(5)) == []
        with Engine(root) as writer:
            writer.put(keys(5))
            wait_for(lambda: reader.held(keys(5)) == keys(5))
            assert reader.get(keys(5)) == keys(5)


def test_queue_of_stores_is_bounded_and_drops_the_end(root: Path) -> None:
    with Engine(root, store_queue_bytes=20 * CHUNK, io_bytes=4 * CHUNK) as engine:
        faults.arm("segment.before_write=sleep:0.3")
        engine.start_store(keys(60))
        (done,) = engine.finish()
        assert done.ok
        assert done.bytes == 20 * CHUNK
        assert engine.held(keys(60)) == keys(20)
        assert engine.store.stats().dropped_chunks == {"queue": 40}


def test_everything_is_private_whatever_the_umask(root: Path) -> None:
    with Engine(root) as engine:
        engine.put(keys(5))
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_bytes": 1 * MIB}, "max_bytes = 1048576 holds 0 segments"),
        ({"segment_bytes": 8 * KIB}, "cannot hold a chunk of 16384 bytes"),
        ({"io_bytes": 0}, "io_bytes = 0"),
        ({"mode": "rw"}, "mode = 'rw'"),
        ({"direct_io": "maybe"}, "direct_io"),
    ],
)
def test_bad_settings_are_one_line(root: Path, settings: dict[str, object], says: str) -> None:
    with pytest.raises(StoreError) as caught:
        Engine(root, **settings)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_roots_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is not a directory"):
        Engine(tmp_path / "file")
    with pytest.raises(StoreError, match="ENOTDIR"):
        Engine(tmp_path / "file" / "below")
    with pytest.raises(StoreError, match="does not exist"):
        Engine(tmp_path / "none", mode="read")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "root.json").write_text("{")
    with pytest.raises(StoreError, match=r"root\.json is damaged"):
        Engine(tmp_path / "odd")


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    root, target = tmp_path / "root", tmp_path / "elsewhere"
    with Engine(root) as engine:
        engine.put(keys(5))
    (segment,) = segments(root)
    segment.rename(target)
    segment.symlink_to(target)
    with Engine(root) as engine:
        assert engine.held(keys(5)) == []
    assert target.stat().st_size > 0


def test_a_failed_constructor_leaves_no_thread(root: Path) -> None:
    import threading

    before = threading.active_count()
    with pytest.raises(StoreError):
        Engine(root, root.parent / "other", max_bytes=1 * MIB)
    wait_for(lambda: threading.active_count() <= before)


def test_memory_must_be_flat_and_writable(root: Path) -> None:
    settings = StoreSettings((root,))
    with pytest.raises(StoreError, match="writable"):
        ChunkStore(settings, Namespace(FINGERPRINT), memoryview(bytes(CHUNK)), CHUNK)


def test_after_shutdown_jobs_fail_and_nothing_hangs(root: Path) -> None:
    engine = Engine(root)
    engine.put(keys(5))
    assert engine.store.shutdown()
    assert engine.store.shutdown()
    engine.store.submit_load(1, keys(2), [0, 1])
    engine.store.submit_store(2, keys(2, 9), [0, 1])
    done = {each.job_id: each for each in engine.store.take_completions()}
    assert not done[1].ok
    assert done[2].bytes == 0


def test_payload_is_what_the_harness_says() -> None:
    assert payload(b"a") != payload(b"b")
