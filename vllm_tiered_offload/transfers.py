# SPDX-License-Identifier: Apache-2.0
"""What is under way between the GPU and the pool, so that a callback counts once.

The pool's own counters are trusted blindly by vLLM: a second `complete_load`
takes a pin that belongs to someone else, a late `complete_store` declares a row
readable that a promotion is still filling. So a callback is checked here first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class OpenTransfers:
    """Keys of unfinished loads (pool to GPU) and stores (GPU to pool)."""

    def __init__(self) -> None:
        self._loads: dict[str, Counter[bytes]] = {}
        self._stores: dict[bytes, object] = {}  # key -> the request object

    def __len__(self) -> int:
        return len(self._stores) + sum(loads.total() for loads in self._loads.values())

    def open_load(self, request_id: str, keys: Iterable[bytes]) -> None:
        self._loads.setdefault(request_id, Counter()).update(keys)

    def close_load(self, request_id: str, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` that were being loaded for this request."""
        loads = self._loads.get(request_id)
        if loads is None:
            return []
        closed = []
        for key in keys:
            if loads[key] > 0:
                loads[key] -= 1
                closed.append(key)
        if not +loads:
            del self._loads[request_id]
        return closed

    def open_store(self, request: object, keys: Iterable[bytes]) -> None:
        self._stores.update(dict.fromkeys(keys, request))

    def close_store(self, keys: Iterable[bytes]) -> dict[bytes, object]:
        """Those of `keys` that were being stored, with the request that began it."""
        return {key: self._stores.pop(key) for key in keys if key in self._stores}

    def clear(self) -> None:
        self._loads.clear()
        self._stores.clear()
