# SPDX-License-Identifier: Apache-2.0
"""The only file that knows differences between vLLM versions.

Differences are found by looking at signatures, never by comparing version
strings: nightlies and vendor builds carry versions that say nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _keywords(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset(parameters), takes_any


def call(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `function` with those of `kwargs` that its signature knows.

    vLLM 0.33 added keywords (`info`, `tier_poll_interval_s`) that 0.30 to 0.32
    refuse; both sides are served by one call site.
    """
    names, takes_any = _keywords(function)
    known = kwargs if takes_any else {k: v for k, v in kwargs.items() if k in names}
    return function(*args, **known)
