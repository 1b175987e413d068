# SPDX-License-Identifier: Apache-2.0
"""Keys of requests with an adapter, there and back."""

from __future__ import annotations

from typing import Any

from vllm_tiered_offload.fs_tier.adapters import AdapterTag
from vllm_tiered_offload.fs_tier.keys import StoreKeys

KEYS = [n.to_bytes(32, "big") + b"\0\0\0\1" for n in range(4)]


class Request:
    def __init__(self, adapter: int | None) -> None:
        self._tag = None if adapter is None else AdapterTag(adapter)

    def get_state(self, cls: type) -> Any:
        return self._tag


def test_without_salting_tags_do_not_matter() -> None:
    keys = StoreKeys(salt_adapters=False, remember=True)
    assert keys.adapter(Request(7)) is None
    assert keys.to_store(KEYS, None) == KEYS
    assert keys.of_event(KEYS, removed=True) == KEYS


def test_base_model_keys_stay_themselves() -> None:
    keys = StoreKeys(salt_adapters=True, remember=True)
    assert keys.adapter(Request(None)) is None
    assert keys.to_store(KEYS, None) == KEYS
    assert keys.of_event(KEYS, removed=False) == KEYS


def test_adapters_never_meet_and_the_way_back_is_exact() -> None:
    keys = StoreKeys(salt_adapters=True, remember=False)
    one, two = (keys.to_store(KEYS, keys.adapter(Request(n))) for n in (1, 2))
    assert len({*one, *two, *KEYS}) == 3 * len(KEYS)
    assert all(key.endswith(b"\0\0\0\1") for key in one)
    assert keys.from_store(one, 1) == tuple(KEYS)
    assert keys.from_store(KEYS, None) == tuple(KEYS)


def test_events_name_the_keys_vllm_knows_until_they_are_removed() -> None:
    keys = StoreKeys(salt_adapters=True, remember=True)
    salted = keys.to_store(KEYS, 3)
    assert keys.of_event(salted, removed=False) == KEYS
    assert keys.of_event(salted, removed=True) == KEYS
    assert keys.of_event(salted, removed=True) == salted  # forgotten: nothing leaks


def test_what_is_remembered_is_bounded() -> None:
    keys = StoreKeys(salt_adapters=True, remember=True, most=2)
    salted = keys.to_store(KEYS, 3)
    assert keys.of_event(salted, removed=True) == [*salted[:2], *KEYS[2:]]
