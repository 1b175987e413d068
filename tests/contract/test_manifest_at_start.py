# SPDX-License-Identifier: Apache-2.0
"""A root whose manifest contradicts the namespace stops the start; nothing is touched."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest

from vllm_tiered_offload.config import FsTierSettings
from vllm_tiered_offload.fs_tier import wiring
from vllm_tiered_offload.fs_tier.fingerprint import IdentityError
from vllm_tiered_offload.fs_tier.identity import Layout, resolve_namespace
from vllm_tiered_offload.store import ChunkStore

CHUNK = 64 << 10
NAMESPACE = resolve_namespace(
    None,
    Layout(tokens_per_hash=16, blocks_per_chunk=1, chunk_bytes=CHUNK, groups=()),
    cache_namespace="prod",
).namespace


def open_store(root: Path) -> ChunkStore:
    settings = FsTierSettings.parse({"root_dir": str(root), "max_bytes": "64MiB"})
    memory = memoryview(mmap.mmap(-1, CHUNK))
    return wiring.open_store(settings, NAMESPACE, memory, CHUNK, events=False)


def test_start_is_refused_in_one_line(tmp_path: Path) -> None:
    for _ in range(2):  # the second start accepts what the first one wrote
        assert open_store(tmp_path).shutdown()
    path = tmp_path / "namespaces" / f"{NAMESPACE.fingerprint}.json"
    stored = json.loads(path.read_text())
    stored["manifest"]["fields"]["cache_namespace"] = "test"
    path.write_text(json.dumps(stored))
    before = sorted(entry.name for entry in tmp_path.rglob("*"))
    with pytest.raises(IdentityError, match="its fields give") as refused:
        open_store(tmp_path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == before
