# SPDX-License-Identifier: Apache-2.0
"""The bytes on the disk: pinned by a golden file, and nothing damaged gets past."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import payload
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.direct_io import BlockIO
from vllm_tiered_offload.store.recovery import Kind, SegmentReader
from vllm_tiered_offload.store.segment import Segment, State
from vllm_tiered_offload.store.segment_log import SegmentLog
from vllm_tiered_offload.store.syscalls import Syscalls

GOLDEN = Path(__file__).parent / "golden" / "segment_v1.bin"
PAGE = 4096
HEADER = fmt.PageBlock(
    magic=fmt.SEGMENT_MAGIC,
    page_bytes=PAGE,
    segment_bytes=16 * PAGE,
    sequence=7,
    offset=0,
    chunk_bytes=5000,
    slot=3,
    private=True,
    at=1_700_000_000_000_000_000,
    length=4242,
    fingerprint="0123456789abcdef" * 2,
)
KEYS = [b"k" * 36, b"short", b"x" * 64]


def write_segment(path: Path) -> None:
    """An extent of two chunks, a mark, an extent of one, sealed."""
    io = BlockIO(Syscalls(), PAGE, direct=False)
    path.write_bytes(HEADER.pack().ljust(HEADER.segment_bytes, b"\0"))
    fd = io.open(str(path), 2)
    log = SegmentLog(Segment(0, str(path), HEADER, State.OWN), fd, io)
    for part in (KEYS[:2], KEYS[2:]):
        payloads = [payload(key, HEADER.chunk_bytes) for key in part]
        checksums = [
            fmt.digest(data, fmt.payload_seed(HEADER.fingerprint, key))
            for key, data in zip(part, payloads, strict=True)
        ]
        log.append(part, [memoryview(bytearray(data)) for data in payloads], checksums)
        log.mark()
    log.seal()


def test_bytes_are_those_of_version_1(tmp_path: Path) -> None:
    """A change here needs a new format version: caches of users hold these bytes."""
    write_segment(tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == GOLDEN.read_bytes()


def test_golden_file_reads_back() -> None:
    io = BlockIO(Syscalls(), PAGE, direct=False)
    reader = SegmentReader(io)
    fd = io.open(str(GOLDEN), 0)
    kind, header = reader.identify(fd)
    assert (kind, header) == (Kind.SEGMENT, HEADER)
    records = reader.footer(fd, HEADER)
    assert records is not None
    assert fmt.record_keys(records) == KEYS
    assert all(reader.payloads_match(fd, HEADER, records))
    scan = reader.scan(fd, HEADER, PAGE)
    assert [fmt.record_keys(extent.records) for extent in scan.extents] == [KEYS[:2], KEYS[2:]]
    assert scan.committed == scan.next_offset - PAGE  # the last mark


def test_header_fields_lie_where_the_table_says() -> None:
    page = HEADER.pack()
    assert page[0:8] == b"VTOSEGM\0"
    assert int.from_bytes(page[8:12], "little") == 1
    assert int.from_bytes(page[24:32], "little") == 7
    assert int.from_bytes(page[48:52], "little") == 3
    assert page[72:104] == HEADER.fingerprint.encode()
    assert int.from_bytes(page[4088:4096], "little") == fmt.digest(page[:4088])


@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_header_of_any_page_size_comes_back(page_bytes: int) -> None:
    header = fmt.replace(HEADER, page_bytes=page_bytes, segment_bytes=16 * page_bytes)
    page = header.pack()
    assert len(page) == page_bytes
    assert fmt.unpack_page_block(page, fmt.SEGMENT_MAGIC) == header


@given(bit=st.integers(0, 8 * 4096 - 1))
def test_any_flipped_bit_of_a_header_is_noticed(bit: int) -> None:
    page = bytearray(HEADER.pack())
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(fmt.FormatError):
        fmt.unpack_page_block(bytes(page), fmt.SEGMENT_MAGIC)


@given(bit=st.integers(0, 8 * (64 + 2 * 88) - 1))
def test_any_flipped_bit_of_a_table_is_noticed(bit: int) -> None:
    records = fmt.make_records(KEYS[:2], [8192, 16384], [1, 2])
    table = memoryview(bytearray(PAGE))
    fmt.pack_table(
        table,
        fmt.EXTENT_MAGIC,
        records,
        sequence=7,
        offset=4096,
        committed=4096,
        page_bytes=PAGE,
    )
    table[bit // 8] ^= 1 << bit % 8
    with pytest.raises(fmt.FormatError):
        fmt.unpack_table(table, fmt.EXTENT_MAGIC, 4096, PAGE)


def test_newer_version_is_told_from_damage() -> None:
    page = bytearray(HEADER.pack())
    page[8] = 2
    page[4088:4096] = fmt.digest(bytes(page[:4088])).to_bytes(8, "little")
    with pytest.raises(fmt.NewerFormatError):
        fmt.unpack_page_block(bytes(page), fmt.SEGMENT_MAGIC)


@given(st.lists(st.binary(min_size=1, max_size=64), max_size=50))
def test_keys_of_any_length_survive(keys: list[bytes]) -> None:
    records = fmt.make_records(keys, range(len(keys)), range(len(keys)))
    assert fmt.record_keys(records) == keys


def test_same_bytes_under_another_key_or_namespace_have_another_checksum() -> None:
    seeds = {fmt.payload_seed(name, key) for name in ("ab" * 16, "cd" * 16) for key in KEYS}
    assert len({fmt.digest(b"payload", seed) for seed in seeds}) == 6
