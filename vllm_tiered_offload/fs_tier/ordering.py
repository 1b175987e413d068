# SPDX-License-Identifier: Apache-2.0
"""The prefix order of a cascade's keys.

vLLM hands a cascade its keys as a set. Written in that order, the chunks of one prompt lie
scattered over an extent and a later load of the prefix becomes many short reads; written in
prefix order it is a few long ones.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

_GROUP_BYTES = 4  # an offload key ends with its KV group, big-endian
_UNKNOWN = 1 << 62  # behind every known position, in the order given


class PrefixOrder:
    """Sorts the keys of a job by KV group, then by place in the prompt.

    The place is `ReqContext.get_offload_key_position` (the chunk's end token). Where vLLM has
    no such thing (0.30) it is the order in which `touch` named the request's keys, which is
    the prompt's: `record` must then be called from there.

    Groups are kept apart because they are loaded apart: a sliding-window group loads only its
    last chunks, and interleaving the groups would cut the other group's runs.
    """

    def __init__(self) -> None:
        self._recorded: dict[str, dict[bytes, int]] = {}

    def record(self, req_context: Any, keys: Iterable[bytes]) -> None:
        """Note keys in prompt order; a no-op where vLLM knows positions itself."""
        if hasattr(req_context, "get_offload_key_position"):
            return
        order = self._recorded.setdefault(req_context.req_id, {})
        for key in keys:
            order.setdefault(key, len(order))

    def forget(self, req_id: str) -> None:
        self._recorded.pop(req_id, None)

    def sort(
        self, keys: Collection[bytes], rows: Sequence[int], req_context: Any
    ) -> tuple[list[bytes], list[int]]:
        """Keys and their rows, both in prefix order; keys of unknown place come last."""
        position = getattr(req_context, "get_offload_key_position", None)
        if position is None:
            position = self._recorded.get(req_context.req_id, {}).get
        decorated = []
        for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
            place = position(key)
            decorated.append(
                (key[-_GROUP_BYTES:], _UNKNOWN if place is None else place, index, key, row)
            )
        decorated.sort()
        return [item[3] for item in decorated], [item[4] for item in decorated]
