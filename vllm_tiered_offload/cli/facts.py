# SPDX-License-Identifier: Apache-2.0
"""What lies in a root, in words and as JSON."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from vllm_tiered_offload.cli.output import human_bytes, human_seconds
from vllm_tiered_offload.store.inspection import NamespaceFacts, SegmentFacts

SHOWN_DIGITS = 12

_DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def duration(text: str, option: str) -> float:
    """Seconds from `90s`, `15m`, `12h`, `30d` or `2w`.

    Raises:
        ValueError: not a duration, in one line that names `option`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{option}: {text!r} is not a duration; give 90s, 15m, 12h, 30d or 2w")
    return float(match[1]) * _DURATIONS[match[2]]


def short(fingerprint: str) -> str:
    return fingerprint[:SHOWN_DIGITS]


def model_of(space: NamespaceFacts) -> str:
    """The model's name as its engine was given it; the last two parts of a path."""
    name = str(_part(space.manifest, "about").get("model") or "?")
    return "/".join(name.rstrip("/").split("/")[-2:])


def kind_of(space: NamespaceFacts) -> str:
    if not space.private:
        return "shared"
    return "private, in use" if space.alive else "private, orphaned"


def identity_of(space: NamespaceFacts) -> str:
    """The parts of the identity that people ask about first."""
    fields = _part(space.manifest, "fields")
    topology = fields.get("topology")
    words = [str(fields.get("kv_dtype") or fields.get("dtype") or "")]
    if isinstance(topology, Mapping):
        words += [
            f"{name.removesuffix('_size')}={size}"
            for name, size in topology.items()
            if name != "world_size" and isinstance(size, int) and size > 1
        ]
    elif topology:
        words.append(f"topology {topology}")
    if fields.get("cache_namespace"):
        words.append(f"cache_namespace={fields['cache_namespace']}")
    return " ".join(word for word in words if word)


def meanings_of(space: NamespaceFacts) -> Mapping[str, Any]:
    """What each field of the manifest stands for."""
    return _part(space.manifest, "meaning")


def fields_of(space: NamespaceFacts) -> Mapping[str, Any]:
    return _part(space.manifest, "fields")


def _part(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = manifest.get(name)
    return part if isinstance(part, Mapping) else {}


def chunk_sizes(space: NamespaceFacts) -> str:
    sizes = {segment.header.chunk_bytes for segment in space.segments if segment.header}
    return ", ".join(human_bytes(size) for size in sorted(sizes)) or "-"


def ago(moment: float, now: float | None = None) -> str:
    """`3 h ago`; `-` for never. `moment` is seconds since 1970."""
    if not moment:
        return "-"
    return f"{human_seconds(max(0.0, (now or time.time()) - moment))} ago"


def space_as_json(space: NamespaceFacts) -> dict[str, Any]:
    return {
        "fingerprint": space.fingerprint,
        "private": space.private,
        "alive": space.alive,
        "orphaned": space.orphaned,
        "chunks": space.chunks,
        "bytes": space.allocated_bytes,
        "segments": [segment_as_json(segment) for segment in space.segments],
        "written_at": space.written_at,
        "manifest": dict(space.manifest),
    }


def segment_as_json(segment: SegmentFacts) -> dict[str, Any]:
    header = segment.header
    return {
        "path": segment.path,
        "slot": segment.slot,
        "kind": segment.kind.value,
        "state": segment.state,
        "sequence": segment.sequence,
        "bytes": segment.allocated_bytes,
        "chunks": segment.chunks,
        "chunk_bytes": header.chunk_bytes if header else None,
        "written_at": segment.written_at,
    }
