# SPDX-License-Identifier: Apache-2.0
"""Huge pages as far as this kernel has them; what it gave is read back, not assumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.region_process import fill, wrong_slots
from vllm_tiered_offload.region import huge_pages
from vllm_tiered_offload.region.shared_region import (
    RegionError,
    RegionSettings,
    SharedOffloadRegion,
)

POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
TWO_MB = 2 << 20

SMAPS = """\
7f0000000000-7f0000400000 rw-s 00000000 00:01 1034 /memfd:vllm-tiered-offload (deleted)
Size:               4096 kB
ShmemPmdMapped:     2048 kB
FilePmdMapped:         0 kB
7f0000400000-7f0000800000 rw-s 00400000 00:01 1034 /memfd:vllm-tiered-offload (deleted)
ShmemPmdMapped:     4096 kB
VmFlags: rd wr sh mr mw me ms
7f0000800000-7f0000c00000 rw-s 00000000 00:01 1034 /memfd:of another
ShmemPmdMapped:     4096 kB
"""


def test_only_this_mapping_is_counted(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(SMAPS)
    assert huge_pages.mapped_huge_bytes(0x7F0000000000, 8 << 20, smaps) == 6 << 20
    assert huge_pages.mapped_huge_bytes(0x7F0000000000, 4 << 20, smaps) == 2 << 20
    assert huge_pages.mapped_huge_bytes(0, 1 << 20, tmp_path / "absent") == 0


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("always within_size advise [never] deny force", "echo advise > .*is never"),
        ("always within_size advise never [deny] force", "is deny"),
        ("always within_size [advise] never deny force", "^$"),
        (None, "no transparent huge pages"),
    ],
)
def test_the_hint_names_the_setting(setting: str | None, hint: str, tmp_path: Path) -> None:
    import re

    if setting is not None:
        (tmp_path / "shmem_enabled").write_text(setting)
    assert re.search(hint, huge_pages.hint("memfd", tmp_path))
    assert "remount,huge=advise" in huge_pages.hint("shm", tmp_path)


def _arguments(engine: dict[str, Any], huge: Any) -> dict[str, Any]:
    sizes = {"num_chunks": 5, "kv_bytes_per_chunk": TWO_MB, "cpu_page_size": TWO_MB - 100}
    return engine | sizes | {"world_size": 1, "settings": RegionSettings(huge_pages=huge)}


@pytest.mark.parametrize("huge", ["auto", "off"])
def test_transparent(huge: str, engine: dict[str, Any]) -> None:
    region = SharedOffloadRegion(rank=0, **_arguments(engine, huge))
    facts = region.describe()
    assert region._opened is not None
    if huge == "off":
        assert facts["huge_bytes"] == 0
        assert facts["huge_hint"] == ""
    else:
        assert region._opened.mapping.address % TWO_MB == 0
        assert facts["huge_bytes"] or facts["huge_hint"] or huge_pages.hint("memfd") == ""
    region.cleanup()


def test_transparent_pages_are_got_where_the_kernel_gives_them(engine: dict[str, Any]) -> None:
    hint = huge_pages.hint("memfd")
    if hint:
        pytest.skip(f"no transparent huge pages for shared memory here: {hint}")
    region = SharedOffloadRegion(rank=0, **_arguments(engine, "auto"))
    scheduler = SharedOffloadRegion(rank=None, **_arguments(engine, "auto"))
    for one in (region, scheduler):
        assert one.describe()["huge_bytes"] == 5 * TWO_MB
        one.cleanup()


@pytest.fixture
def pool() -> Iterator[None]:
    """Sixteen reserved huge pages."""
    if not POOL.exists():
        pytest.skip("this kernel has no hugetlb")
    before = POOL.read_text()
    try:
        POOL.write_text("16")
        if int(POOL.read_text()) < 16:
            pytest.skip("this host cannot reserve sixteen huge pages")
        yield
    except PermissionError:
        pytest.skip("the huge page pool cannot be set here")
    finally:
        POOL.write_text(before)


@pytest.mark.root
def test_explicit(pool: None, engine: dict[str, Any]) -> None:
    arguments = _arguments(engine, "2MB") | {"kv_bytes_per_chunk": TWO_MB + 4096}
    worker = SharedOffloadRegion(rank=0, **arguments)
    scheduler = SharedOffloadRegion(rank=None, **arguments)
    assert worker.total_size_bytes == 5 * (TWO_MB + 4096)  # the tail page's rest is not ours
    assert worker.create_kv_memoryview().shape == (5, TWO_MB + 4096)
    assert worker.describe()["huge_bytes"] == 6 * TWO_MB
    fill(worker, 0)
    assert wrong_slots(scheduler, 1) == []
    worker.cleanup()
    scheduler.cleanup()


@pytest.mark.root
def test_a_pool_too_small_is_refused_before_anything_is_taken(
    pool: None, engine: dict[str, Any]
) -> None:
    arguments = _arguments(engine, "2MB") | {"num_chunks": 17}
    with pytest.raises(RegionError, match=r"needs 17 pages of 2048 KiB, but 16 are free"):
        SharedOffloadRegion(rank=0, **arguments)
