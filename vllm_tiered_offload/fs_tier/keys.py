# SPDX-License-Identifier: Apache-2.0
"""Between the keys vLLM speaks of and the keys the store keeps.

They differ for requests with a LoRA adapter only (see `adapters`); for all others, and
wherever salting is off, a key is itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_tiered_offload.fs_tier.adapters import adapter_of, salted


class StoreKeys:
    """Salts keys on their way to the store, and takes the salt off on their way back.

    Args:
        salt_adapters: whether keys of requests with an adapter are salted.
        remember: whether events need the way back from a key alone, long after its job; it
            costs one dictionary entry per adapter's chunk, up to `most`, oldest first out.
    """

    def __init__(self, salt_adapters: bool, remember: bool, most: int = 1 << 20) -> None:
        self.salts = salt_adapters
        self._most = most
        self._originals: dict[bytes, bytes] | None = {} if salt_adapters and remember else None

    def adapter(self, req_context: Any) -> int | None:
        """What to salt this request's keys with; None: not at all."""
        return adapter_of(req_context) if self.salts else None

    def to_store(self, keys: list[bytes], adapter: int | None) -> list[bytes]:
        if adapter is None:
            return keys
        found = [salted(key, adapter) for key in keys]
        if self._originals is not None:
            self._remember(self._originals, found, keys)
        return found

    def _remember(
        self, originals: dict[bytes, bytes], found: list[bytes], keys: list[bytes]
    ) -> None:
        originals.update(zip(found, keys, strict=True))
        # Not every key reaches the disk and leaves it again with an event.
        while len(originals) > self._most:
            del originals[next(iter(originals))]

    def from_store(self, keys: Iterable[bytes], adapter: int | None) -> tuple[bytes, ...]:
        """Undo `to_store`: the salt is its own inverse."""
        if adapter is None:
            return tuple(keys)
        return tuple(salted(key, adapter) for key in keys)

    def of_event(self, keys: Iterable[bytes], removed: bool) -> list[bytes]:
        """The keys of an event as vLLM knows them; a removed key is forgotten."""
        originals = self._originals
        if originals is None:
            return list(keys)
        find = originals.pop if removed else originals.get
        return [find(key, key) for key in keys]
