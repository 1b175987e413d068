# SPDX-License-Identifier: Apache-2.0
"""What may share a cache: from a description of the engine to a namespace.

A chunk on disk is found by vLLM's block hash, which covers the tokens and nothing
else: not the weights, not the layout of the bytes. Everything else that determines
the bytes of a chunk goes into a namespace's fingerprint here. Whatever cannot be
known leaves the namespace private to this process (nothing another process stored is
ever served) unless the user vouches for it with `cache_namespace`.

Pure: the facts come as plain data, collected in the workers, who alone know the
resolved attention backends (`spec/facts.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_tiered_offload.fs_tier.fingerprint import (
    FACTS,
    FORMAT_VERSION,
    fingerprint,
    manifest_of,
    mapping,
    plain,
)
from vllm_tiered_offload.store import Namespace

# All ranks load the same files, so only the first one looks at them.
_OF_FIRST_RANK = frozenset({"weights", "draft_weights"})
# Of a layer's KV spec, what depends on the number of ranks. Left out in the portable
# layout, where the page of all ranks together counts instead.
_PER_RANK_SPEC = frozenset({"num_kv_heads", "num_head_slots", "page_size_padded"})


@dataclass(frozen=True, slots=True)
class Layout:
    """How the bytes of a chunk are laid out, as far as the scheduler knows.

    `groups` holds one mapping a KV cache group: `id`, `tokens_per_block`, `layers`.
    `portable`: vLLM's canonical layout, claimed to be the same bytes under any number
    of ranks; believed only where every worker has certified every layer.
    """

    tokens_per_hash: int
    blocks_per_chunk: int
    chunk_bytes: int
    groups: tuple[Mapping[str, Any], ...]
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    replicated: bool = False
    canonical: bool = False
    portable: bool = False
    model_name: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """The namespace to open, and what to tell the operator about it.

    `private_reasons` is empty when the cache is shared and survives a restart.
    `salt_adapters`: keys of requests with a LoRA adapter must be salted
    (`adapters.salted`), because the namespace outlives the adapter's weights.
    """

    namespace: Namespace
    private_reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    salt_adapters: bool = False


def layout_of(config: Any, chunk_bytes: int) -> Layout:
    """The layout from vLLM's `OffloadingConfig` and the bytes of one row of the pool."""
    parallel = config.parallel
    canonical = bool(getattr(config, "canonical_layout", False))
    return Layout(
        tokens_per_hash=config.cache.tokens_per_hash,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        chunk_bytes=chunk_bytes,
        groups=tuple(
            {
                "id": getattr(group, "group_id", index),
                "tokens_per_block": group.tokens_per_block,
                "layers": list(group.layer_names),
            }
            for index, group in enumerate(config.groups)
        ),
        world_size=parallel.world_size,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        pcp_size=parallel.pcp_size,
        dcp_size=parallel.dcp_size,
        replicated=bool(getattr(config, "replicated_layout", False)),
        canonical=canonical,
        portable=canonical and bool(parallel.is_parallelism_agnostic),
        model_name=str(config.model.name),
    )


def resolve_namespace(
    facts: Sequence[Mapping[str, Any]] | None,
    layout: Layout,
    *,
    cache_namespace: str | None = None,
    lora_adapters_immutable: bool = False,
    adapters_tagged: bool = False,
    entropy: Callable[[int], bytes] = os.urandom,
) -> Identity:
    """The namespace for an engine described by `facts` and `layout`.

    `facts`: one mapping a rank in rank order, or None where none can come (vLLM's own
    spec). `adapters_tagged`: requests with an adapter carry an `adapters.AdapterTag`.
    `entropy(n)` gives n random bytes, for private namespaces.
    """
    fields, unknown = _fields(facts, layout)
    fields["cache_namespace"] = cache_namespace
    first = facts[0] if facts else {}
    # What a worker could not find out is never taken for granted.
    fixed = lora_adapters_immutable and bool(first.get("lora_path_in_keys", not facts))
    reasons = _reasons_to_stay_private(facts or (), fixed, adapters_tagged)
    warnings: list[str] = []
    if unknown and cache_namespace is None:
        reasons = unknown + reasons
    elif unknown:
        warnings.append(
            f"cache_namespace {cache_namespace!r} alone stands for what is not known here: "
            f"{'; '.join(unknown)}. Change it whenever one of these changes"
        )
    about = {**dict(first.get("about", {})), "model": layout.model_name}
    about["hashing"] = first.get("hashing")
    if reasons:
        namespace = _private(fields, reasons, about, entropy)
        warnings.append(f"this cache does not survive a restart: {'; '.join(reasons)}")
    else:
        namespace = Namespace(fingerprint(fields), manifest_of(fields, about))
    return Identity(
        namespace, tuple(reasons), tuple(warnings), salt_adapters=adapters_tagged and not fixed
    )


def epoch_namespace(
    namespace: Namespace, entropy: Callable[[int], bytes] = os.urandom
) -> Namespace:
    """A namespace for what is stored after a reset: of this process alone.

    The weights may have changed under the fingerprint that was taken at the start.
    """
    fields = dict(mapping(namespace.manifest.get("fields")))
    about = dict(mapping(namespace.manifest.get("about")))
    return _private(fields, ["stored after a reset of the cache"], about, entropy)


def _fields(
    facts: Sequence[Mapping[str, Any]] | None, layout: Layout
) -> tuple[dict[str, object], list[str]]:
    fields: dict[str, object] = {"format_version": FORMAT_VERSION}
    topology = {
        name: value
        for name, value in asdict(layout).items()
        if name in {"world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"}
    }
    for name in ("tokens_per_hash", "blocks_per_chunk", "chunk_bytes", "groups", "replicated"):
        fields[name] = getattr(layout, name)
    fields["topology"] = topology
    fields["canonical"] = layout.canonical
    if not facts:
        return fields, [
            "vLLM's own spec hands over no description of the model (weights, dtype, "
            "attention backends, LoRA)"
        ]
    if len(facts) != layout.world_size:
        return fields, [f"{len(facts)} of {layout.world_size} workers described themselves"]
    fields.update(_joined(facts))
    if _certified(facts, layout):
        _make_portable(fields, facts)
    return fields, _unknown(facts)


def _joined(facts: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Each fact once where all ranks agree, else the list of what each rank says."""
    joined: dict[str, object] = {}
    for name in FACTS:
        values = [plain(rank.get(name)) for rank in facts]
        agreed = name in _OF_FIRST_RANK or all(value == values[0] for value in values)
        joined[name] = values[0] if agreed else {"by_rank": values}
    return joined


def _unknown(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    missing: dict[str, str] = {}
    for index, rank in enumerate(facts):
        why = mapping(rank.get("unknown"))
        for name, words in FACTS.items():
            if name not in rank and (index == 0 or name not in _OF_FIRST_RANK):
                missing.setdefault(name, f"{words} ({why.get(name, 'not reported')})")
    return list(missing.values())


def _certified(facts: Sequence[Mapping[str, Any]], layout: Layout) -> bool:
    """Whether the bytes are the same under any number of ranks, by everyone's account."""
    if not layout.portable or layout.pp_size * layout.pcp_size * layout.dcp_size != 1:
        return False
    canonical = [plain(rank.get("canonical")) for rank in facts]
    return bool(canonical[0]) and all(page == canonical[0] for page in canonical)


def _make_portable(fields: dict[str, object], facts: Sequence[Mapping[str, Any]]) -> None:
    fields["topology"] = "any"
    fields["canonical"] = plain(facts[0]["canonical"])
    fields.pop("pages")
    fields.pop("interleave")
    reduced = [
        {
            **layer,
            "spec": {k: v for k, v in layer["spec"].items() if k not in _PER_RANK_SPEC},
        }
        for layer in facts[0].get("layers", ())
    ]
    fields["layers"] = reduced


def _reasons_to_stay_private(
    facts: Sequence[Mapping[str, Any]], adapters_fixed: bool, adapters_tagged: bool
) -> list[str]:
    """What no `cache_namespace` can vouch for."""
    unsure = ("whether weights change while the engine runs is not known",)
    reasons = [str(why) for rank in facts[:1] for why in rank.get("never_shared", unsure)]
    lora = any(rank.get("lora", True) for rank in facts)
    if lora and not (adapters_fixed or adapters_tagged):
        reasons.append(
            "LoRA is enabled and vLLM's keys do not cover the adapters' weights (state "
            "lora_adapters_immutable, or use TieredOffloadingConnector)"
        )
    if any(mapping(rank.get("hashing")).get("seed") == "random" for rank in facts):
        reasons.append(
            "the prefix hash has a random seed in each process (set PYTHONHASHSEED, or use "
            "--prefix-caching-hash-algo sha256)"
        )
    return reasons


def _private(
    fields: Mapping[str, object],
    reasons: Sequence[str],
    about: Mapping[str, object],
    entropy: Callable[[int], bytes],
) -> Namespace:
    own = {**fields, "private": entropy(16).hex()}
    manifest = manifest_of(own, {**about, "private_because": list(reasons)})
    return Namespace(fingerprint(own), manifest, private=True)
