# SPDX-License-Identifier: Apache-2.0
"""Descriptors that a forked child must not keep.

Close-on-exec does nothing for a child that never calls exec. Such a child
would keep the memory alive (a memfd), or make a dead rank look alive (a socket).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> object: ...


T = TypeVar("T", bound=Closable)

_private: weakref.WeakSet[Closable] = weakref.WeakSet()


def keep_private(resource: T) -> T:
    """Close `resource` in every child forked from now on; returns it.

    Its `close` must be idempotent and leave no descriptor number behind that
    a later close could hit after the number was reused.
    """
    _private.add(resource)
    return resource


class PrivateFd:
    """A raw descriptor, closed once and never inherited by a forked child."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        keep_private(self)

    def fileno(self) -> int:
        if self._fd < 0:
            raise ValueError("the descriptor is closed")
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self.close()


def _close_in_child() -> None:
    for resource in tuple(_private):
        with contextlib.suppress(OSError):
            resource.close()


os.register_at_fork(after_in_child=_close_in_child)
