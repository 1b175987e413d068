# SPDX-License-Identifier: Apache-2.0
"""Looking at a root from outside, beside stores that use it."""

import json
import os

import pytest

from tests.support.store_roots import (
    CHUNK,
    PRIVATE,
    SEGMENT,
    SHARED,
    damage,
    fill,
    make_root,
    open_store,
)
from vllm_tiered_offload.store import StoreError
from vllm_tiered_offload.store.inspection import look_at
from vllm_tiered_offload.store.recovery import Kind


def test_a_closed_root(tmp_path):
    make_root(tmp_path, 40)
    facts = look_at(tmp_path)
    (space,) = facts.namespaces
    assert space.fingerprint == SHARED.fingerprint
    assert space.manifest == SHARED.manifest
    assert (space.private, space.alive, space.orphaned) == (False, None, False)
    assert space.chunks == 40
    assert {segment.state for segment in facts.segments} == {"sealed"}
    assert all(segment.header.chunk_bytes == CHUNK for segment in facts.segments)
    assert facts.root.geometry.segment_bytes == SEGMENT
    assert facts.allocated_bytes >= 40 * CHUNK
    assert facts.strays == ()


def test_a_segment_being_written(tmp_path):
    with open_store(tmp_path) as store:
        fill(store, range(3))
        states = [segment.state for segment in look_at(tmp_path).segments]
        assert states == ["writing"]
        # Looking takes no lock that lasts: the store goes on and closes cleanly.
        fill(store, range(100, 103))
    assert look_at(tmp_path).namespaces[0].chunks == 6


def test_a_private_namespace_lives_as_long_as_its_process(tmp_path):
    with open_store(tmp_path, PRIVATE) as store:
        fill(store, range(3))
        (space,) = look_at(tmp_path).namespaces
        assert (space.private, space.alive, space.orphaned) == (True, True, False)
    (space,) = look_at(tmp_path).namespaces
    assert (space.alive, space.orphaned) == (False, True)


def test_a_namespace_without_segments_and_a_segment_without_manifest(tmp_path):
    make_root(tmp_path, 3)
    (tmp_path / "namespaces" / f"{'ef' * 20}.json").write_text(json.dumps({"manifest": {}}))
    (tmp_path / "namespaces" / f"{SHARED.fingerprint}.json").write_text("{damaged")
    spaces = {space.fingerprint: space for space in look_at(tmp_path).namespaces}
    assert spaces["ef" * 20].segments == ()
    assert spaces[SHARED.fingerprint].chunks == 3
    assert spaces[SHARED.fingerprint].manifest == {}


def test_odd_files_in_slots(tmp_path):
    make_root(tmp_path, 3)
    segments = tmp_path / "segments"
    (segments / "000010.seg").touch()
    (segments / "000011.seg").write_bytes(b"x" * 8192)
    os.mkfifo(segments / "000012.seg")
    (segments / "000013.seg").symlink_to("/etc/passwd")
    (segments / "notes.txt").write_text("not a slot")
    kinds = {segment.slot: segment.kind for segment in look_at(tmp_path).strays}
    assert kinds == {
        10: Kind.EMPTY,
        11: Kind.DAMAGED,
        12: Kind.STRANGE,
        13: Kind.STRANGE,
    }


def test_a_damaged_footer_leaves_what_the_marks_prove(tmp_path):
    make_root(tmp_path, 5)
    (segment,) = look_at(tmp_path).segments
    damage(segment.path, segment.header.segment_bytes - 2 * 4096)  # the footer's table
    (segment,) = look_at(tmp_path).segments
    assert segment.state == "unsealed"
    assert segment.chunks <= 5


def test_nothing_is_written(tmp_path):
    make_root(tmp_path, 20)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    look_at(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_not_a_root(tmp_path):
    with pytest.raises(StoreError, match="holds no store"):
        look_at(tmp_path)
    with pytest.raises(StoreError, match="is not a directory"):
        look_at(tmp_path / "no")
    (tmp_path / "root.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        look_at(tmp_path)
