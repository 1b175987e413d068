# SPDX-License-Identifier: Apache-2.0
"""A process that uses a store, for tests that need more than one or kill one.

storing_process.py store ROOT SALT DIRECT   stores new chunks until killed, a line a job
storing_process.py hold ROOT SALT DIRECT    stores 20 chunks, says so, waits for a line
storing_process.py stress ROOT SALT DIRECT SECONDS SHARE
                                            stores and loads, checks every byte
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from harness import CHUNK, KIB, MIB, Engine, keys


def engine(root: str, direct: str, **settings: object) -> Engine:
    usual: dict[str, object] = {"max_bytes": 24 * MIB, "segment_bytes": 512 * KIB}
    return Engine(Path(root), direct_io=direct, **(usual | settings))


def store(root: str, salt: str, direct: str) -> None:
    made = engine(root, direct)
    say(f"recovered {made.store.stats().chunks}")
    for job in range(100_000):
        number = 8 * job % 4000
        wanted = keys(8, number, salt)
        made.put(wanted)
        # Hit in the middle of their stay: these get copied before their segment goes.
        made.held(keys(8, number - 600, salt))
        if job % 20 == 19:
            time.sleep(0.1)  # idle long enough for a mark
        say(f"stored {number}")


def hold(root: str, salt: str, direct: str) -> None:
    made = engine(root, direct)
    made.put(keys(20, salt=salt))
    say("stored 20")
    sys.stdin.readline()
    made.store.shutdown()
    say("closed")


def stress(root: str, salt: str, direct: str, seconds: str, share: str) -> None:
    """``share`` per cent of the keys are the same in all processes."""
    made = engine(root, direct)
    dice = random.Random(f"{salt}{os.getpid()}")
    end = time.monotonic() + float(seconds)
    loaded = 0
    while time.monotonic() < end:
        whose = "shared" if dice.randrange(100) < int(share) else salt
        wanted = keys(dice.randrange(1, 17), 16 * dice.randrange(200), whose)
        held = made.held(wanted)
        if held:
            loaded += len(made.get(held))
        if len(held) < len(wanted):
            made.put(wanted)
    stats = made.store.stats()
    assert made.store.shutdown(), "threads hang"
    corrupt = stats.failed_chunks.get("corrupt", 0)
    say(f"loaded {loaded} stored {stats.stored_chunks} corrupt {corrupt} wrong 0")
    damaged = {n: c for root in stats.roots for n, c in root.counters.items() if "damage" in n}
    say(f"evicted {stats.evicted_segments} copied {stats.copied_chunks} damaged {damaged}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    assert CHUNK  # the harness is importable only beside this file
    {"store": store, "hold": hold, "stress": stress}[sys.argv[1]](*sys.argv[2:])
