# SPDX-License-Identifier: Apache-2.0
"""Requests with a LoRA adapter, in a cache that outlives the adapter's weights.

vLLM's keys hold an adapter's name and path, never its weights: after a restart the same
key may stand for other bytes. So the connector tags such requests, and the tier stores and
looks them up under keys salted by a value of this process alone: they hit as long as this
process lives, and no other process can ever find them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_GROUP_BYTES = 4  # an offload key ends with its KV group; vLLM reads it there
_SALT = os.urandom(32)
_tagging: ContextVar[bool] = ContextVar("vllm_tiered_offload_tagging", default=False)


@dataclass(frozen=True, slots=True)
class AdapterTag:
    """Request state (`ReqContext.set_state`): this request runs with an adapter.

    `adapter_id` is vLLM's number of the loaded adapter. An adapter that is loaded again
    gets another one, so its new weights never meet the KV of its old ones.
    """

    adapter_id: int


@contextlib.contextmanager
def tagging() -> Iterator[None]:
    """While a connector that tags its requests builds its scheduler side."""
    token = _tagging.set(True)
    try:
        yield
    finally:
        _tagging.reset(token)


def tagging_enabled() -> bool:
    """Whether the connector under construction tags requests with an adapter."""
    return _tagging.get()


def adapter_of(req_context: Any) -> int | None:
    """The adapter's number if the request was tagged; None for the base model."""
    tag = req_context.get_state(AdapterTag)
    return None if tag is None else tag.adapter_id


def salted(key: bytes, adapter_id: int) -> bytes:
    """The key under which this process, and no other, keeps an adapter's chunk.

    Same length and same group as `key`, and its own inverse: salted twice it is `key`.
    Two keys of one adapter never meet, since all are masked alike.
    """
    size = len(key) - _GROUP_BYTES
    pad = _pad(adapter_id, size)
    masked = int.from_bytes(key[:size], "big") ^ pad
    return masked.to_bytes(size, "big") + key[size:]


@functools.lru_cache(maxsize=1024)
def _pad(adapter_id: int, size: int) -> int:
    digest = hashlib.blake2b(str(adapter_id).encode(), key=_SALT, digest_size=max(1, size))
    return int.from_bytes(digest.digest(), "big") if size else 0
