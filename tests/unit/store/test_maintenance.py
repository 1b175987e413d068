# SPDX-License-Identifier: Apache-2.0
"""Verify, prune and clear: what they find, what they take, and what they leave alone."""

import os

import pytest

from tests.support.store_roots import (
    CHUNK,
    PRIVATE,
    ROWS,
    SHARED,
    damage,
    fill,
    key,
    make_root,
    open_store,
)
from vllm_tiered_offload.store import StoreError, locks
from vllm_tiered_offload.store import maintenance as care
from vllm_tiered_offload.store.inspection import look_at


def verified(facts, segments=None):
    seen = []
    verifier = care.Verifier(facts.root, care.Pace(0), lambda n, size: seen.append((n, size)))
    damages = list(verifier.verify(facts.segments if segments is None else segments))
    return damages, sum(chunks for chunks, _ in seen), sum(size for _, size in seen)


class TestVerify:
    def test_a_good_root(self, tmp_path):
        make_root(tmp_path, 40)
        damages, chunks, size = verified(look_at(tmp_path))
        assert damages == []
        assert (chunks, size) == (40, 40 * CHUNK)

    def test_one_flipped_byte_is_one_bad_chunk(self, tmp_path):
        make_root(tmp_path, 5)
        (segment,) = look_at(tmp_path).segments
        damage(segment.path, 2 * 4096 + 100)  # in the first payload
        (found,), _, _ = verified(look_at(tmp_path))
        assert found.keys == (key(0),)
        assert "1 of 5 chunks" in found.problem

    def test_a_damaged_header_and_a_damaged_footer(self, tmp_path):
        make_root(tmp_path, 40)
        first, second, *_ = look_at(tmp_path).segments
        damage(first.path, 100)
        damage(second.path, second.header.segment_bytes - 2 * 4096)
        damages, _, _ = verified(look_at(tmp_path))
        assert [found.segment.path for found in damages] == [first.path, second.path]
        assert damages[0].problem == "no valid header"
        assert "footer" in damages[1].problem

    def test_an_eviction_meanwhile_is_no_damage(self, tmp_path):
        make_root(tmp_path, 40)
        facts = look_at(tmp_path)
        unlinked, emptied, *_ = facts.segments
        os.unlink(unlinked.path)
        os.truncate(emptied.path, 0)
        damages, chunks, _ = verified(facts)
        assert damages == []
        assert 0 < chunks < 40

    def test_a_slot_taken_anew_is_no_damage(self, tmp_path):
        make_root(tmp_path, 40)
        facts = look_at(tmp_path)
        os.replace(facts.segments[1].path, facts.segments[0].path)
        assert verified(facts)[0] == []

    def test_the_pace(self):
        now, slept = [0.0], []

        def sleep(seconds):
            slept.append(seconds)
            now[0] += seconds

        pace = care.Pace(100, clock=lambda: now[0], sleep=sleep)
        pace.moved(50)
        pace.moved(50)
        assert sum(slept) == pytest.approx(1.0)
        now[0] += 10
        pace.moved(100)
        assert sum(slept) == pytest.approx(1.0)


class TestChoosing:
    def test_the_oldest_go_first_until_the_rest_fits(self, tmp_path):
        make_root(tmp_path, 100)
        facts = look_at(tmp_path)
        chosen = care.over_bytes(facts, facts.allocated_bytes // 2)
        assert [s.sequence for s in chosen] == sorted(s.sequence for s in facts.segments)[
            : len(chosen)
        ]
        left = facts.allocated_bytes - sum(s.allocated_bytes for s in chosen)
        assert left <= facts.allocated_bytes // 2
        assert left + chosen[-1].allocated_bytes > facts.allocated_bytes // 2
        assert care.over_bytes(facts, facts.allocated_bytes) == []

    def test_what_can_never_hit_goes_before_the_oldest(self, tmp_path):
        make_root(tmp_path, 20)
        with open_store(tmp_path, PRIVATE) as store:
            fill(store, range(5))
        facts = look_at(tmp_path)
        (first, *_) = care.over_bytes(facts, facts.allocated_bytes - 1)
        assert first.header.fingerprint == PRIVATE.fingerprint

    def test_by_age(self, tmp_path):
        make_root(tmp_path, 40)
        facts = look_at(tmp_path)
        old = facts.segments[1]
        os.utime(old.path, (1000, 1000))
        facts = look_at(tmp_path)
        now = max(segment.written_at for segment in facts.segments)
        assert [s.path for s in care.older_than(facts, 3600, now)] == [old.path]

    def test_orphans(self, tmp_path):
        make_root(tmp_path, 40)
        with open_store(tmp_path, PRIVATE) as store:
            fill(store, range(5))
            live = {s.path for s in care.orphans(look_at(tmp_path))}
        (tmp_path / "segments" / "000099.seg").touch()
        facts = look_at(tmp_path)
        found = {s.path for s in care.orphans(facts)}
        dead = {s.path for s in facts.segments if s.header and s.header.private}
        assert live == set()
        assert found == dead | {str(tmp_path / "segments" / "000099.seg")}

    def test_a_segment_being_written_is_never_chosen(self, tmp_path):
        with open_store(tmp_path) as store:
            fill(store, range(3))
            facts = look_at(tmp_path)
            assert care.over_bytes(facts, 0) == []
            assert care.of_namespaces(facts, facts.namespaces) == []


class TestRemoving:
    def test_what_is_gone_is_a_miss_to_a_running_store(self, tmp_path):
        make_root(tmp_path, 40)
        with open_store(tmp_path) as store:
            assert store.contains(key(0))
            facts = look_at(tmp_path)
            (oldest, *_) = care.removal_order(facts)
            removed = care.remove_segments(facts.root, [oldest])
            assert removed.segments == (oldest,)
            assert removed.allocated_bytes == oldest.allocated_bytes
            store.submit_load(1, [key(0), key(39)], [0, 1])
            store.drain()
            (done,) = store.take_completions()
            assert not done.ok
            assert done.loaded_keys == (key(39),)
            assert not store.contains(key(0))

    def test_a_live_writer_keeps_its_segment(self, tmp_path):
        with open_store(tmp_path) as store:
            fill(store, range(3))
            facts = look_at(tmp_path)
            removed = care.remove_segments(facts.root, facts.segments)
            assert removed.segments == ()
            assert removed.busy == facts.segments
            fill(store, range(50, 53))
        assert look_at(tmp_path).namespaces[0].chunks == 6

    def test_a_slot_taken_anew_is_kept(self, tmp_path):
        make_root(tmp_path, 40)
        facts = look_at(tmp_path)
        old, new, *_ = facts.segments
        os.replace(new.path, old.path)
        removed = care.remove_segments(facts.root, [old])
        assert removed.busy == (old,)
        assert os.path.exists(old.path)

    def test_a_store_writes_on_after_everything_was_cleared(self, tmp_path):
        make_root(tmp_path, 40)
        facts = look_at(tmp_path)
        assert len(care.remove_segments(facts.root, facts.segments).segments) == len(
            facts.segments
        )
        assert care.remove_manifests(facts.root, [SHARED.fingerprint]) == 1
        with open_store(tmp_path) as store:
            assert not store.contains(key(0))
            fill(store, range(ROWS))
        facts = look_at(tmp_path)
        assert facts.namespaces[0].chunks == ROWS
        assert facts.namespaces[0].manifest == SHARED.manifest

    def test_the_manifest_of_a_living_private_namespace_stays(self, tmp_path):
        with open_store(tmp_path, PRIVATE):
            facts = look_at(tmp_path)
            assert care.remove_manifests(facts.root, [PRIVATE.fingerprint]) == 0
        assert care.remove_manifests(facts.root, [PRIVATE.fingerprint]) == 1

    def test_which_manifests_may_go(self, tmp_path):
        make_root(tmp_path, 3)
        with open_store(tmp_path, PRIVATE):
            facts = look_at(tmp_path)
            now = facts.segments[0].written_at
            assert care.forgettable(facts, now) == []
        care.remove_segments(facts.root, facts.segments)
        facts = look_at(tmp_path)
        assert care.forgettable(facts, now) == [PRIVATE.fingerprint]
        assert set(care.forgettable(facts, now + 30 * 86400)) == {
            PRIVATE.fingerprint,
            SHARED.fingerprint,
        }

    def test_without_locks_nothing_is_removed(self, tmp_path, monkeypatch):
        make_root(tmp_path, 3)
        facts = look_at(tmp_path)
        monkeypatch.setattr(locks, "probe", lambda *_: "ENOLCK: No locks available")
        with pytest.raises(StoreError, match="ENOLCK"):
            care.remove_segments(facts.root, facts.segments)
        assert os.path.exists(facts.segments[0].path)
