# SPDX-License-Identifier: Apache-2.0
"""The fields of an identity, their digest, and the manifest that explains them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Raise it whenever the meaning of a field or of a chunk's bytes changes.
FORMAT_VERSION = 1
FINGERPRINT_DIGITS = 40

# Fields of the fingerprint that the workers report, then those known without them. The
# manifest carries the words.
FACTS: dict[str, str] = {
    "vllm": "vLLM's major.minor version",
    "weights": "the model's weights",
    "load_format": "how the weights are loaded",
    "model": "the effective model configuration, overrides included",
    "dtype": "the effective dtype",
    "kv_dtype": "the dtype of the KV cache",
    "quantization": "the quantization method and its settings",
    "kv_layout": "the KV cache layout",
    "layers": "KV spec, attention backend and, on CPUs, instruction set of each layer",
    "pages": "which pages make up a block",
    "draft": "the draft model and its method",
    "draft_weights": "the draft model's weights",
    "multimodal": "how images, audio and video become tokens",
    "platform": "the platform and its number formats",
    "interleave": "how context parallelism deals out tokens",
}
LAYOUT_WORDS: dict[str, str] = {
    "format_version": "what a fingerprint and a chunk on disk mean",
    "tokens_per_hash": "tokens covered by one block hash",
    "blocks_per_chunk": "blocks in one chunk",
    "chunk_bytes": "bytes of one chunk, padding included",
    "groups": "KV cache groups: id, tokens per block, layers",
    "topology": "numbers of ranks by kind of parallelism",
    "replicated": "one copy for all ranks, since all hold the same bytes",
    "canonical": "vLLM's canonical layout; its pages where every layer is certified portable",
    "cache_namespace": "the tier's key of that name",
    "private": "random: of one process alone",
}


class IdentityError(ValueError):
    """A stored manifest contradicts the fingerprint it is filed under."""


def fingerprint(fields: Mapping[str, object]) -> str:
    """`FINGERPRINT_DIGITS` lower-case hex digits of the SHA-256 of the canonical JSON."""
    text = json.dumps(plain(fields), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def check_manifest(wanted: str, stored: object) -> None:
    """Compare a manifest found on disk with the fingerprint it is filed under.

    Raises:
        IdentityError: it is of another format, or its fields give another fingerprint:
            damaged, edited, or two descriptions that collide. One line.
    """
    manifest = mapping(stored)
    if manifest.get("format") != FORMAT_VERSION:
        raise IdentityError(
            f"manifest of namespace {wanted}: format {manifest.get('format')!r}, "
            f"not {FORMAT_VERSION}; remove the namespace or use another root_dir"
        )
    found = fingerprint(mapping(manifest.get("fields")))
    if found != wanted:
        raise IdentityError(
            f"manifest of namespace {wanted}: its fields give {found}; it is damaged or "
            "was edited, remove the namespace or use another root_dir"
        )


def manifest_of(fields: Mapping[str, object], about: Mapping[str, object]) -> dict[str, object]:
    """What is filed under `fingerprint(fields)`; `about` is for people and counts nothing."""
    return {
        "format": FORMAT_VERSION,
        "fields": plain(fields),
        "meaning": {name: {**FACTS, **LAYOUT_WORDS}[name] for name in fields},
        "about": plain(about),
    }


def plain(value: object) -> Any:
    """The value as JSON would give it back: text keys, lists, and nothing else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"a {type(value).__name__} cannot be part of an identity: {value!r}")


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
