# SPDX-License-Identifier: Apache-2.0
"""A bounded, checksummed log of segments on one or more directories.

Knows chunks as opaque keys and rows of one flat buffer; knows neither vLLM nor
torch. ``ChunkStore`` is the way in; ``format`` says what is on the disk.
"""

from vllm_tiered_offload.store.api import (
    Completion,
    Namespace,
    RootStats,
    StoreError,
    StoreEvent,
    StoreSettings,
    StoreStats,
)
from vllm_tiered_offload.store.chunk_store import ChunkStore

__all__ = [
    "ChunkStore",
    "Completion",
    "Namespace",
    "RootStats",
    "StoreError",
    "StoreEvent",
    "StoreSettings",
    "StoreStats",
]
