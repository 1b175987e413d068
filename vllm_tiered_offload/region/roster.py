# SPDX-License-Identifier: Apache-2.0
"""Which ranks have mapped the region, and what they told about themselves."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Member:
    """One rank: its process, its facts, and whether its mapping is done."""

    pid: int
    facts: Mapping[str, object]
    mapped: bool = False


class Roster:
    """The creator's list of ranks; safe to use from several threads."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._members: dict[int, Member] = {}
        self._complete: dict[int, dict[str, object]] | None = None
        self._changed = threading.Condition()

    def enter(self, rank: int, pid: int, facts: Mapping[str, object]) -> int | None:
        """Take the place of `rank`; the pid of its holder when it is taken."""
        with self._changed:
            holder = self._members.get(rank)
            if holder is not None:
                return holder.pid
            self._members[rank] = Member(pid, facts)
            return None

    def mark_mapped(self, rank: int) -> bool:
        """Note that `rank` has the region mapped; True when all have now."""
        with self._changed:
            self._members[rank].mapped = True
            if self._missing():
                return False
            self._complete = self._facts()
            self._changed.notify_all()
            return True

    def leave(self, rank: int) -> None:
        """The process of `rank` is gone."""
        with self._changed:
            self._members.pop(rank, None)

    def _missing(self) -> list[int]:
        mapped = {rank for rank, member in self._members.items() if member.mapped}
        return [rank for rank in range(self._world_size) if rank not in mapped]

    def missing(self) -> list[int]:
        """Ranks that have not mapped the region, in order."""
        with self._changed:
            return self._missing()

    def _facts(self) -> dict[int, dict[str, object]]:
        return {r: dict(m.facts) for r, m in sorted(self._members.items()) if m.mapped}

    def facts(self) -> dict[int, dict[str, object]]:
        """Facts of the ranks that have mapped the region."""
        with self._changed:
            return self._facts()

    def wait_until_complete(self, timeout: float) -> dict[int, dict[str, object]] | None:
        """Facts of all ranks once all were there together; None after `timeout` seconds.

        They may have left again by now: the end of the hand-over parts them.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._complete is not None, timeout)
            return self._complete


def name_ranks(ranks: list[int]) -> str:
    """ "rank 3" or "ranks 1, 3"."""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"
