# SPDX-License-Identifier: Apache-2.0
"""Format v1 of a segment file, the only file that holds chunks.

::

    | header page | extent | extent | ...  (free) ... | footer | trailer page |
    extent:         | record pages | payload 0 | payload 1 | ... |

All integers are little-endian and unsigned. Every offset and length is a
multiple of ``page_bytes`` (the root's; at least 4096). Checksums are xxh3-64.
No offset is written twice. Nothing moves when a segment is sealed: footer and
trailer have their place at the end of the file from the start, and the file
keeps the length it was created with.

Page block: one page; header and trailer. Bytes not named are zero.

====== ===== ==================================================================
offset bytes field
====== ===== ==================================================================
0      8     magic: ``VTOSEGM\\0`` header, ``VTOTRLR\\0`` trailer
8      4     format version (1)
12     4     page_bytes
16     8     segment_bytes: length of the file
24     8     sequence: rises with every segment of a root, never reused
32     8     own offset: 0 in a header, segment_bytes - page_bytes in a trailer
40     8     chunk_bytes, before rounding up to a page
48     4     slot: the number in the file's name
52     4     flags: bit 0, a private namespace
56     8     header: creation, ns since 1970; trailer: offset of the footer
64     8     header: pid of the writer, for people; trailer: length of the footer
72     64    namespace fingerprint, ASCII, zero-padded
4088   8     checksum of bytes 0 to 4087
====== ===== ==================================================================

The places of magic, version and checksum are the same in every version to come,
so that a file of a newer version can be told from a damaged one.

Table: whole pages; the records of an extent, and of the footer all records of
the segment. An extent without records is a mark: one page that says how far the
file is readable.

====== ===== ==================================================================
offset bytes field
====== ===== ==================================================================
0      8     magic: ``VTOEXTN\\0`` extent, ``VTOFOOT\\0`` footer
8      8     sequence of the segment
16     8     own offset
24     8     committed: all writes below this offset had returned
32     4     number of records, n
36     4     length of the table in pages
40     16    zero
56     8     checksum of bytes 0 to 55 and of the records
64     88 n  records
====== ===== ==================================================================

Record:

====== ===== ==================================================================
0      64    key, zero-padded
64     2     length of the key
66     6     zero
72     8     offset of the payload in the file
80     8     checksum of the payload (chunk_bytes), seeded by ``payload_seed``
====== ===== ==================================================================

A payload occupies chunk_bytes rounded up to a page; the rest is zero.
Another process may use an extent once a *later* table says ``committed`` at or
above its end: one write is not atomic to a reader, so a valid table proves
nothing about the payload behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

VERSION = 1
SEGMENT_MAGIC = b"VTOSEGM\0"
TRAILER_MAGIC = b"VTOTRLR\0"
EXTENT_MAGIC = b"VTOEXTN\0"
FOOTER_MAGIC = b"VTOFOOT\0"

MIN_PAGE_BYTES = 4096
MAX_KEY_BYTES = 64
TABLE_HEADER_BYTES = 64
_PAGE_BLOCK = struct.Struct("<8sIIQQQQIIQQ64s")
_PAGE_CHECKSUM_AT = 4088
_TABLE = struct.Struct("<8sQQQII")
_TABLE_CHECKSUM_AT = 56
_U64 = struct.Struct("<Q")
_PRIVATE = 1

RECORD = np.dtype(
    [
        ("key", "u1", (MAX_KEY_BYTES,)),
        ("key_bytes", "<u2"),
        ("zero", "u1", (6,)),
        ("offset", "<u8"),
        ("checksum", "<u8"),
    ]
)
Records = npt.NDArray[np.void]


class FormatError(ValueError):
    """Bytes that are not what the format says; the message says how."""


class NewerFormatError(FormatError):
    """A whole and valid header of a version this code does not know."""


@dataclass(frozen=True, slots=True)
class PageBlock:
    """Header or trailer of a segment; the fields are those of the byte table."""

    magic: bytes
    page_bytes: int
    segment_bytes: int
    sequence: int
    offset: int
    chunk_bytes: int
    slot: int
    private: bool
    at: int  # header: creation time; trailer: offset of the footer
    length: int  # header: pid; trailer: length of the footer
    fingerprint: str

    def pack(self) -> bytes:
        """One page of bytes."""
        body = _PAGE_BLOCK.pack(
            self.magic,
            VERSION,
            self.page_bytes,
            self.segment_bytes,
            self.sequence,
            self.offset,
            self.chunk_bytes,
            self.slot,
            _PRIVATE if self.private else 0,
            self.at,
            self.length,
            self.fingerprint.encode("ascii"),
        ).ljust(_PAGE_CHECKSUM_AT, b"\0")
        return (body + _U64.pack(digest(body))).ljust(self.page_bytes, b"\0")


@dataclass(frozen=True, slots=True)
class TableHeader:
    """What stands before the records of an extent or a footer."""

    magic: bytes
    sequence: int
    offset: int
    committed: int
    count: int
    pages: int


def digest(data: bytes | memoryview, seed: int = 0) -> int:
    """The format's checksum."""
    return xxhash.xxh3_64_intdigest(data, seed)


def payload_seed(fingerprint: str, key: bytes) -> int:
    """Seed of a chunk's checksum: bytes under another key or namespace do not pass."""
    return xxhash.xxh3_64_intdigest(seed_prefix(fingerprint) + key)


def seed_prefix(fingerprint: str) -> bytes:
    """What a seed's digest is over, before the key."""
    return fingerprint.encode("ascii") + b"\0"


def payload_digest(prefix: bytes, key: bytes, payload: memoryview) -> int:
    """A chunk's checksum; ``prefix`` is computed once for many chunks."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(prefix + key))


def round_up(size: int, unit: int) -> int:
    """``size`` raised to a multiple of ``unit``."""
    return -(-size // unit) * unit


def table_bytes(records: int, page_bytes: int) -> int:
    """Length of a table of so many records, in bytes."""
    return round_up(TABLE_HEADER_BYTES + records * RECORD.itemsize, page_bytes)


def unpack_page_block(page: bytes | memoryview, magic: bytes) -> PageBlock:
    """Reads a header or trailer; needs its first 4096 bytes.

    Raises FormatError for anything damaged, NewerFormatError for a newer version.
    """
    if len(page) < MIN_PAGE_BYTES:
        raise FormatError(f"{len(page)} bytes where a page of {MIN_PAGE_BYTES} was expected")
    fields = _PAGE_BLOCK.unpack_from(page)
    found, version, flags = fields[0], fields[1], fields[8]
    if found != magic:
        raise FormatError(f"magic {found!r} where {magic!r} was expected")
    (checksum,) = _U64.unpack_from(page, _PAGE_CHECKSUM_AT)
    if checksum != digest(bytes(page[:_PAGE_CHECKSUM_AT])):
        raise FormatError("checksum of the page does not match")
    if version != VERSION:
        raise NewerFormatError(f"format version {version}, this is version {VERSION}")
    block = PageBlock(
        magic=found,
        page_bytes=fields[2],
        segment_bytes=fields[3],
        sequence=fields[4],
        offset=fields[5],
        chunk_bytes=fields[6],
        slot=fields[7],
        private=bool(flags & _PRIVATE),
        at=fields[9],
        length=fields[10],
        fingerprint=fields[11].rstrip(b"\0").decode("ascii", "replace"),
    )
    _check_geometry(block)
    return block


def make_trailer(header: PageBlock, footer_at: int, footer_bytes: int) -> PageBlock:
    """The trailer that seals the segment of ``header``."""
    offset = header.segment_bytes - header.page_bytes
    return replace(
        header, magic=TRAILER_MAGIC, offset=offset, at=footer_at, length=footer_bytes
    )


def _check_geometry(block: PageBlock) -> None:
    page = block.page_bytes
    if page < MIN_PAGE_BYTES or block.segment_bytes % page or block.chunk_bytes == 0:
        raise FormatError(
            f"page {page}, segment {block.segment_bytes}, chunk {block.chunk_bytes} bytes"
        )


def pack_table(
    out: memoryview,
    magic: bytes,
    records: Records,
    *,
    sequence: int,
    offset: int,
    committed: int,
    page_bytes: int,
) -> int:
    """Writes a table to the front of ``out``, which is reused; returns its length in bytes."""
    used = TABLE_HEADER_BYTES + records.nbytes
    length = table_bytes(len(records), page_bytes)
    pages = length // page_bytes
    _TABLE.pack_into(out, 0, magic, sequence, offset, committed, len(records), pages)
    out[_TABLE.size : _TABLE_CHECKSUM_AT] = bytes(_TABLE_CHECKSUM_AT - _TABLE.size)
    out[TABLE_HEADER_BYTES:used] = records.tobytes()
    out[used:length] = bytes(length - used)
    _U64.pack_into(out, _TABLE_CHECKSUM_AT, _table_digest(out, used))
    return length


def unpack_table_header(page: bytes | memoryview, magic: bytes, offset: int) -> TableHeader:
    """Reads the front of a table that lies at ``offset``, without its checksum.

    Good only to learn how much to read: what counts is ``unpack_table``.
    """
    if len(page) < TABLE_HEADER_BYTES:
        raise FormatError(f"{len(page)} bytes where a table was expected")
    header = TableHeader(*_TABLE.unpack_from(page))
    if header.magic != magic:
        raise FormatError(f"magic {header.magic!r} where {magic!r} was expected")
    if header.offset != offset:
        raise FormatError(f"a table of offset {header.offset} lies at {offset}")
    if header.pages == 0 or header.committed > offset:
        raise FormatError(f"{header.pages} pages, committed {header.committed} at {offset}")
    return header


def unpack_table(
    table: bytes | memoryview, magic: bytes, offset: int, page_bytes: int
) -> tuple[TableHeader, Records]:
    """Reads and checks a whole table. Raises FormatError for anything damaged or cut."""
    header = unpack_table_header(table, magic, offset)
    used = TABLE_HEADER_BYTES + header.count * RECORD.itemsize
    if header.pages * page_bytes != table_bytes(header.count, page_bytes) or used > len(table):
        raise FormatError(f"{header.count} records in {header.pages} pages, {len(table)} bytes")
    (checksum,) = _U64.unpack_from(table, _TABLE_CHECKSUM_AT)
    if checksum != _table_digest(table, used):
        raise FormatError("checksum of the table does not match")
    return header, np.frombuffer(table, RECORD, header.count, TABLE_HEADER_BYTES)


def make_records(
    keys: Sequence[bytes], offsets: Sequence[int], checksums: Sequence[int]
) -> Records:
    """Records from columns. Keys are 1 to 64 bytes long."""
    records = np.zeros(len(keys), RECORD)
    if len(keys):
        padded = b"".join(key.ljust(MAX_KEY_BYTES, b"\0") for key in keys)
        records["key"] = np.frombuffer(padded, np.uint8).reshape(-1, MAX_KEY_BYTES)
        records["key_bytes"] = [len(key) for key in keys]
        records["offset"] = offsets
        records["checksum"] = checksums
    return records


def record_keys(records: Records) -> list[bytes]:
    """The keys, as bytes objects; one slice each when all have one length."""
    if not len(records):
        return []
    lengths = records["key_bytes"]
    longest = min(int(lengths.max()), MAX_KEY_BYTES)
    blob = records["key"][:, :longest].tobytes()
    keys = [blob[at : at + longest] for at in range(0, len(blob), longest)]
    if int(lengths.min()) != longest:
        return [key[:length] for key, length in zip(keys, lengths.tolist(), strict=True)]
    return keys


def _table_digest(table: bytes | memoryview, used: int) -> int:
    state = xxhash.xxh3_64(bytes(table[:_TABLE_CHECKSUM_AT]))
    state.update(table[TABLE_HEADER_BYTES:used])
    return state.intdigest()
