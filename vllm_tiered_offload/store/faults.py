# SPDX-License-Identifier: Apache-2.0
"""Named places where a test may stop, delay or fail the process.

``VTO_FAULTS="segment.after_write=kill:3,reader.before_read=sleep:0.5"`` arms points
by name: ``kill[:n]`` sends SIGKILL at the n-th passage, ``sleep:seconds``
delays every passage, ``errno:NAME[:n]`` raises that OSError n times (for ever
without n). Unset, a point costs one dictionary look-up in an empty dictionary.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

_lock = threading.Lock()
_armed: dict[str, list[str]] = {}


def arm(text: str) -> None:
    """Replaces what is armed by ``text``, written as in the environment."""
    fresh: dict[str, list[str]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = item.partition("=")
        fresh[name] = action.split(":")
    with _lock:
        _armed.clear()
        _armed.update(fresh)


def point(name: str) -> None:
    """Does what is armed for ``name``, normally nothing."""
    action = _armed.get(name)
    if action is not None:
        _act(name, action)


def _act(name: str, action: list[str]) -> None:
    kind = action[0]
    if kind == "sleep":
        time.sleep(float(action[1]))
    elif kind == "kill":
        if _passages_left(action, 1) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "errno":
        code = getattr(errno, action[1])
        if len(action) < 3 or _passages_left(action, 2) >= 0:
            raise OSError(code, f"{os.strerror(code)} (armed at {name})")


def _passages_left(action: list[str], place: int) -> int:
    """Counts one passage down; the number stands in the action itself."""
    with _lock:
        left = int(action[place]) - 1 if len(action) > place else 0
        action[place:] = [str(left)]
        return left


arm(os.environ.get("VTO_FAULTS", ""))
