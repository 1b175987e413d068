# SPDX-License-Identifier: Apache-2.0
"""Keys of requests with a LoRA adapter: of this process, and of this load of the adapter."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_offload.fs_tier import adapters
from vllm_tiered_offload.fs_tier.adapters import AdapterTag, adapter_of, salted

KEYS = st.binary(min_size=4, max_size=64)


class Context:
    def __init__(self, *states: object) -> None:
        self._states = {type(state): state for state in states}

    def get_state(self, kind: type) -> object | None:
        return self._states.get(kind)


@given(KEYS, st.integers(0, 2**31))
def test_salting_keeps_length_and_group_and_undoes_itself(key: bytes, adapter: int) -> None:
    found = salted(key, adapter)
    assert len(found) == len(key)
    assert found[-4:] == key[-4:]
    assert salted(found, adapter) == key


@given(st.lists(st.binary(min_size=36, max_size=36), unique=True, max_size=20))
def test_different_keys_stay_different(keys: list[bytes]) -> None:
    assert len({salted(key, 1) for key in keys}) == len(keys)


@given(st.binary(min_size=36, max_size=36))
def test_adapters_and_the_base_model_never_share(key: bytes) -> None:
    assert len({key, salted(key, 1), salted(key, 2), salted(key, 0)}) == 4


def test_another_process_has_another_salt() -> None:
    key = bytes(32) + b"\0\0\0\1"
    script = (
        "from vllm_tiered_offload.fs_tier.adapters import salted;"
        f"print(salted(bytes.fromhex('{key.hex()}'), 1).hex())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    }
    assert len(runs | {salted(key, 1).hex()}) == 3


def test_only_tagged_requests_have_an_adapter() -> None:
    assert adapter_of(Context()) is None
    assert adapter_of(Context(AdapterTag(0))) == 0
    assert adapter_of(Context(AdapterTag(7), "other state")) == 7


def test_tagging_holds_inside_the_block_and_this_thread_only() -> None:
    assert not adapters.tagging_enabled()
    seen = []
    with adapters.tagging():
        assert adapters.tagging_enabled()
        thread = threading.Thread(target=lambda: seen.append(adapters.tagging_enabled()))
        thread.start()
        thread.join()
    assert seen == [False]
    assert not adapters.tagging_enabled()


def test_tagging_ends_with_an_error() -> None:
    with pytest.raises(RuntimeError), adapters.tagging():
        raise RuntimeError
    assert not adapters.tagging_enabled()
