# SPDX-License-Identifier: Apache-2.0
"""What a process expects of the region; two processes that differ may not share one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

PROTOCOL = 1


def _namespace(kind: str) -> str:
    """Identity of a Linux namespace, e.g. "pid:[4026531836]"; "" where /proc hides it."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Everything that has to be equal in all processes of one engine. Sizes in bytes."""

    engine_id: str
    num_chunks: int
    row_bytes: int
    slot_bytes: int
    world_size: int
    backing: str
    huge_pages: str
    container: str = ""
    protocol: int = PROTOCOL

    @classmethod
    def make(cls, **fields: object) -> Claim:
        """A claim of this process: filled in with the container it runs in."""
        container = f"{_namespace('pid')} {_namespace('mnt')}"
        return cls(container=container, **fields)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def token(self) -> str:
        """Digest of the whole claim, 64 hex digits."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: Mapping[str, object]) -> str:
        """Readable differences, "" when there are none: "row_bytes 4096 here, 8192 there"."""
        found = []
        for name, mine in self.to_json().items():
            theirs = other.get(name)
            if mine != theirs:
                found.append(f"{name} {mine} here, {theirs} there")
        return "; ".join(found)


def name_of(engine_id: str) -> str:
    """A file name for an engine id of any length and any characters, 40 hex digits."""
    return hashlib.sha256(f"{os.geteuid()}:{engine_id}".encode()).hexdigest()[:40]
