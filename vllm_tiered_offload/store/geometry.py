# SPDX-License-Identifier: Apache-2.0
"""How a root's bytes are divided, which all processes that use it agree on: root.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.api import MIB, StoreError, StoreSettings
from vllm_tiered_offload.store.small_files import read_json, write_json

SLACK_BYTES = MIB  # directories, root.json, root.lock
SLOT_OVERHEAD_BYTES = 64 << 10  # a file system's own blocks for one segment
LARGEST_SEGMENT_BYTES = 256 * MIB
SEGMENTS_PER_ROOT = 64
COMFORTABLE_CHUNKS = 4  # fewer in a segment, and its four pages of overhead begin to count
MOST_SLOTS = 999_999
MOST_CHUNKS = 1 << 24  # in a segment: what a place in the index can number
# Two writers keep a fast disk busy where one leaves it idle between its calls, 0.98 against
# 0.85 of its rate; their open and spare segments are to be a small share of the root.
SLOTS_FOR_TWO_WRITERS = 128


@dataclass(frozen=True, slots=True)
class Geometry:
    """What root.json says; the same for every process that uses the root."""

    page_bytes: int
    segment_bytes: int
    max_bytes: int | None


def segment_bytes_needed(chunk_bytes: int, chunks: int, page_bytes: int) -> int:
    """Length of a segment that holds so many chunks in one extent."""
    stride = fmt.round_up(chunk_bytes, page_bytes)
    tables = 2 * fmt.table_bytes(chunks, page_bytes)
    return 2 * page_bytes + tables + chunks * stride


def choose_segment_bytes(
    budget: int, chunk_bytes: int, page_bytes: int, least_slots: int, wanted: int | None
) -> int:
    """A 64th of the budget, at most 256 MiB; more where chunks are too large for that."""
    usual = min(LARGEST_SEGMENT_BYTES, budget // SEGMENTS_PER_ROOT)
    size = (usual if wanted is None else wanted) // page_bytes * page_bytes
    if wanted is None:
        comfortable = segment_bytes_needed(chunk_bytes, COMFORTABLE_CHUNKS, page_bytes)
        most = (budget - SLACK_BYTES) // least_slots - SLOT_OVERHEAD_BYTES
        size = max(size, min(comfortable, most // page_bytes * page_bytes))
        size = max(size, segment_bytes_needed(chunk_bytes, 1, page_bytes))
    return size


def writers_of(settings: StoreSettings, slots: int) -> int:
    """Threads that write to a root of so many slots, each of them a segment of its own."""
    return settings.write_threads or (2 if slots >= SLOTS_FOR_TWO_WRITERS else 1)


def least_slots(settings: StoreSettings) -> int:
    """One to fill and one to read per writer, and one to free."""
    return 2 * writers_of(settings, 0) + 1


def writers_that_fit(slots: int) -> int:
    """For how many writers so many slots are not too few; at least 1."""
    return max(1, (slots - 1) // 2)


def read_geometry(path: str) -> Geometry | None:
    """root.json; None where there is none. Raises StoreError for a damaged or newer one."""
    try:
        fields = read_json(f"{path}/root.json")
        if fields["format"] != fmt.VERSION:
            raise StoreError(
                f"{path}/root.json is of format {fields['format']}, not {fmt.VERSION}"
            )
        found = Geometry(fields["page_bytes"], fields["segment_bytes"], fields["max_bytes"])
        if not _is_possible(found):
            raise ValueError(f"{found}")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}/root.json is damaged ({error!r}); remove it") from error
    return found


def _is_possible(found: Geometry) -> bool:
    numbers = [found.page_bytes, found.segment_bytes, found.max_bytes or 0]
    if any(type(number) is not int or number < 0 for number in numbers):
        return False
    whole = found.page_bytes >= fmt.MIN_PAGE_BYTES and found.segment_bytes > 0
    return whole and found.segment_bytes % found.page_bytes == 0


def write_geometry(path: str, geometry: Geometry) -> None:
    write_json(f"{path}/root.json", {"format": fmt.VERSION, **asdict(geometry)})
