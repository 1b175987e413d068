# SPDX-License-Identifier: Apache-2.0
"""What shares a namespace and what does not, over plain descriptions."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest

from vllm_tiered_offload.fs_tier import identity
from vllm_tiered_offload.fs_tier.fingerprint import (
    FACTS,
    IdentityError,
    check_manifest,
    fingerprint,
)
from vllm_tiered_offload.fs_tier.identity import (
    Identity,
    Layout,
    epoch_namespace,
    resolve_namespace,
)

LAYOUT = Layout(
    tokens_per_hash=16,
    blocks_per_chunk=1,
    chunk_bytes=131072,
    groups=({"id": 0, "tokens_per_block": 16, "layers": ["layers.0.attn", "layers.1.attn"]},),
    model_name="/models/tiny",
)
SPEC = {"kind": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 2, "head_size": 64}
FACTS_OF_RANK: dict[str, Any] = {
    "rank": 0,
    "unknown": {},
    "vllm": "0.32",
    "weights": {"content": "ab" * 20, "commit": None},
    "load_format": {"format": "auto", "settings": "00"},
    "model": {"digest": "cd" * 16, "text": {"model_type": "llama"}},
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "quantization": None,
    "kv_layout": {"name": "LBHNC", "v2_model_runner": False},
    "layers": [
        {
            "backend": "CPU_ATTN",
            "isa": "vec",
            "spec": SPEC,
            "layers": ["layers.0.attn", "layers.1.attn"],
        }
    ],
    "pages": {"bytes": [[2, 65536]], "refs": "ef" * 16},
    "draft": None,
    "draft_weights": None,
    "multimodal": None,
    "platform": {"device": "cpu", "machine": "x86_64"},
    "interleave": None,
    "canonical": None,
    "lora": False,
    "lora_path_in_keys": True,
    "hashing": {"algorithm": "sha256", "seed": "fixed"},
    "never_shared": [],
    "about": {"vllm": "0.32.0", "weights": {"path": "/models/tiny", "seconds": 0.1}},
}


def facts(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(FACTS_OF_RANK), **changes}


def layout(**changes: Any) -> Layout:
    fields = {name: getattr(LAYOUT, name) for name in Layout.__dataclass_fields__}
    return Layout(**{**fields, **changes})


def resolve(
    ranks: list[dict[str, Any]] | None = None, shape: Layout = LAYOUT, **options: Any
) -> Identity:
    return resolve_namespace([facts()] if ranks is None else ranks, shape, **options)


def digits(*args: Any, **options: Any) -> str:
    found = resolve(*args, **options)
    assert not found.namespace.private, found.private_reasons
    return found.namespace.fingerprint


# --- the digest --------------------------------------------------------------------------


def test_golden_digest() -> None:
    # A change here makes every cache in the field a miss: raise FORMAT_VERSION only with
    # the format, and say so in the change log.
    assert digits() == "66f71225509449a90dd228a229f4a38964f708df"


CHANGED_FACTS: dict[str, Any] = {
    "vllm": "0.33",
    "weights": {"content": "ac" * 20, "commit": None},
    "load_format": {"format": "sharded_state", "settings": "00"},
    "model": {"digest": "ce" * 16, "text": {"model_type": "llama"}},
    "dtype": "float16",
    "kv_dtype": "fp8_e4m3",
    "quantization": {"method": "awq", "settings": "00"},
    "kv_layout": {"name": "LBNHC", "v2_model_runner": False},
    "layers": [{"backend": "CPU_ATTN", "isa": "amx", "spec": SPEC, "layers": ["a"]}],
    "pages": {"bytes": [[1, 131072]], "refs": "ef" * 16},
    "draft": {"method": "eagle"},
    "draft_weights": {"content": "ad" * 20, "commit": None},
    "multimodal": {"mm_processor_kwargs": {"max_pixels": 4}},
    "platform": {"device": "cpu", "machine": "aarch64"},
    "interleave": {"cp": 16},
}


def test_every_fact_has_a_changed_value_here() -> None:
    assert set(CHANGED_FACTS) == set(FACTS)


@pytest.mark.parametrize("name", sorted(CHANGED_FACTS))
def test_each_fact_counts(name: str) -> None:
    assert digits([facts(**{name: CHANGED_FACTS[name]})]) != digits()


@pytest.mark.parametrize(
    "layer",
    [
        {"backend": "TRITON_ATTN"},
        {"isa": "amx"},
        {"layers": ["layers.0.attn", "layers.2.attn"]},
        {"spec": {**SPEC, "head_size": 128}},
        {"spec": {**SPEC, "kind": "SlidingWindowSpec", "sliding_window": 256}},
        {"spec": {**SPEC, "num_kv_heads": 1}},
    ],
    ids=str,
)
def test_each_property_of_a_layer_counts(layer: dict[str, Any]) -> None:
    changed = [{**FACTS_OF_RANK["layers"][0], **layer}]
    assert digits([facts(layers=changed)]) != digits()


CHANGED_LAYOUT: dict[str, Any] = {
    "tokens_per_hash": 32,
    "blocks_per_chunk": 2,
    "chunk_bytes": 135168,
    "groups": ({"id": 1, "tokens_per_block": 16, "layers": ["layers.0.attn"]},),
    "tp_size": 2,
    "pp_size": 2,
    "pcp_size": 2,
    "dcp_size": 2,
    "replicated": True,
    "canonical": True,
}


@pytest.mark.parametrize("name", sorted(CHANGED_LAYOUT))
def test_each_part_of_the_layout_counts(name: str) -> None:
    assert digits(shape=layout(**{name: CHANGED_LAYOUT[name]})) != digits()


def test_all_changes_differ_from_each_other() -> None:
    found = [digits()]
    found += [digits([facts(**{name: value})]) for name, value in CHANGED_FACTS.items()]
    found += [digits(shape=layout(**{name: value})) for name, value in CHANGED_LAYOUT.items()]
    found += [digits(cache_namespace=name) for name in ("a", "b", "", "../x", "a\0", "x" * 300)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"about": {"vllm": "0.32.1", "weights": {"path": "/elsewhere", "seconds": 9.0}}},
        {"hashing": {"algorithm": "sha256_cbor", "seed": "PYTHONHASHSEED"}},
        {"rank": 0, "never_shared": ()},
    ],
    ids=str,
)
def test_what_does_not_determine_the_bytes_is_left_out(changes: dict[str, Any]) -> None:
    assert digits([facts(**changes)]) == digits()


def test_the_models_name_is_left_out() -> None:
    assert digits(shape=layout(model_name="org/name")) == digits()


def test_facts_are_the_same_after_a_journey_as_json() -> None:
    assert digits([json.loads(json.dumps(facts()))]) == digits()


def test_order_of_keys_does_not_count_and_nesting_does() -> None:
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert fingerprint({"a": {"b": 1}}) != fingerprint({"a": 1, "b": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


def test_what_is_not_plain_data_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be part of an identity"):
        fingerprint({"a": object()})


# --- ranks and topologies ----------------------------------------------------------------


def two_ranks(**changes: Any) -> list[dict[str, Any]]:
    second = facts(rank=1, **changes)
    # The second rank does not look at the weights.
    del second["weights"], second["draft_weights"]
    return [facts(**changes), second]


TWO = layout(world_size=2, tp_size=2)


def test_only_the_first_rank_needs_the_weights() -> None:
    assert digits(two_ranks(), TWO)


def test_what_one_rank_says_differently_counts() -> None:
    ranks = two_ranks()
    ranks[1]["layers"] = [{**FACTS_OF_RANK["layers"][0], "isa": "amx"}]
    assert digits(ranks, TWO) != digits(two_ranks(), TWO)


def test_topologies_are_kept_apart() -> None:
    shapes = [
        layout(tp_size=tp, pp_size=pp, dcp_size=dcp, world_size=tp * pp)
        for tp, pp, dcp in itertools.product((1, 2, 4), (1, 2), (1, 2))
    ]
    found = [
        digits([facts(), *two_ranks()[1:] * (shape.world_size - 1)], shape) for shape in shapes
    ]
    assert len(set(found)) == len(found)


CANONICAL = {"format": "v1-hnd", "pages": [[2, 65536]], "refs": "00", "kv_heads": 2}


def test_portable_layout_is_one_namespace_for_all_topologies() -> None:
    one = layout(canonical=True, portable=True)
    two = layout(canonical=True, portable=True, world_size=2, tp_size=2)
    half = [{**FACTS_OF_RANK["layers"][0], "spec": {**SPEC, "num_kv_heads": 1}}]
    pages = {"bytes": [[2, 32768]], "refs": "11"}
    ranks = two_ranks(canonical=CANONICAL, layers=half, pages=pages)
    assert digits(ranks, two) == digits([facts(canonical=CANONICAL)], one)


@pytest.mark.parametrize(
    "canonical", [None, {**CANONICAL, "kv_heads": 4}], ids=["uncertified", "different"]
)
def test_portable_only_if_every_worker_certifies_it(canonical: Any) -> None:
    one = layout(canonical=True, portable=True)
    two = layout(canonical=True, portable=True, world_size=2, tp_size=2)
    ranks = two_ranks(canonical=CANONICAL)
    ranks[1]["canonical"] = canonical
    assert digits(ranks, two) != digits([facts(canonical=CANONICAL)], one)


@pytest.mark.parametrize("axis", ["pp_size", "pcp_size", "dcp_size"])
def test_portable_is_not_believed_beyond_tensor_parallelism(axis: str) -> None:
    one = layout(canonical=True, portable=True)
    other = layout(canonical=True, portable=True, **{axis: 2})
    known = [facts(canonical=CANONICAL)]
    assert digits(known, other) != digits(known, one)


@pytest.mark.parametrize(
    "change",
    [{"chunk_bytes": 262144}, {"tokens_per_hash": 32}, {"replicated": True}],
    ids=str,
)
def test_portable_still_depends_on_the_chunk(change: dict[str, Any]) -> None:
    known = [facts(canonical=CANONICAL)]
    one = layout(canonical=True, portable=True)
    assert digits(known, layout(canonical=True, portable=True, **change)) != digits(known, one)


def test_portable_and_direct_layout_are_kept_apart() -> None:
    known = [facts(canonical=CANONICAL)]
    assert digits(known, layout(canonical=True, portable=True)) != digits(known, LAYOUT)


# --- private namespaces ------------------------------------------------------------------


def test_without_facts_the_cache_is_private_and_the_operator_is_told() -> None:
    found = resolve_namespace(None, LAYOUT)
    assert found.namespace.private
    assert "no description" in found.private_reasons[0]
    assert "does not survive a restart" in found.warnings[-1]
    again = resolve_namespace(None, LAYOUT)
    assert again.namespace.fingerprint != found.namespace.fingerprint


def test_without_facts_cache_namespace_makes_it_persistent() -> None:
    found = resolve_namespace(None, LAYOUT, cache_namespace="prod")
    assert not found.namespace.private
    assert "Change it whenever" in found.warnings[0]
    other = resolve_namespace(None, layout(chunk_bytes=4096), cache_namespace="prod")
    assert other.namespace.fingerprint != found.namespace.fingerprint


@pytest.mark.parametrize("name", sorted(FACTS))
def test_any_missing_fact_makes_it_private(name: str) -> None:
    without = facts(unknown={name: "AttributeError: no such thing"})
    del without[name]
    found = resolve([without])
    assert found.namespace.private
    assert FACTS[name] in found.private_reasons[0]
    assert "no such thing" in found.private_reasons[0]
    assert not resolve([without], cache_namespace="mine").namespace.private


def test_a_fact_missing_on_a_later_rank_makes_it_private() -> None:
    ranks = two_ranks()
    del ranks[1]["layers"]
    assert resolve(ranks, TWO).namespace.private


def test_missing_ranks_make_it_private() -> None:
    found = resolve([facts()], TWO)
    assert found.private_reasons == ("1 of 2 workers described themselves",)


def test_never_shared_outweighs_cache_namespace() -> None:
    found = resolve([facts(never_shared=["weights move"])], cache_namespace="prod")
    assert found.private_reasons == ("weights move",)


def test_random_hash_seed_is_warned_about() -> None:
    hashing = {"algorithm": "xxhash", "seed": "random"}
    found = resolve([facts(hashing=hashing)], cache_namespace="prod")
    assert found.namespace.private
    assert "PYTHONHASHSEED" in found.warnings[-1]


def test_private_namespaces_take_their_entropy_from_the_caller() -> None:
    first = resolve_namespace(None, LAYOUT, entropy=lambda n: b"\1" * n)
    again = resolve_namespace(None, LAYOUT, entropy=lambda n: b"\1" * n)
    assert first.namespace.fingerprint == again.namespace.fingerprint


def test_an_epoch_is_private_and_new_each_time() -> None:
    start = resolve().namespace
    first, second = epoch_namespace(start), epoch_namespace(start)
    assert first.private
    assert len({start.fingerprint, first.fingerprint, second.fingerprint}) == 3
    check_manifest(first.fingerprint, first.manifest)
    assert epoch_namespace(first).fingerprint != first.fingerprint


# --- LoRA --------------------------------------------------------------------------------


def lora(immutable: bool, tagged: bool, **changes: Any) -> Identity:
    return resolve(
        [facts(lora=True, **changes)],
        lora_adapters_immutable=immutable,
        adapters_tagged=tagged,
    )


def test_lora_is_private_with_vllms_connector() -> None:
    found = lora(immutable=False, tagged=False)
    assert found.namespace.private
    assert "lora_adapters_immutable" in found.private_reasons[0]


def test_lora_persists_with_our_connector_and_salts_adapters() -> None:
    found = lora(immutable=False, tagged=True)
    assert not found.namespace.private
    assert found.salt_adapters


def test_immutable_adapters_persist_unsalted() -> None:
    for tagged in (False, True):
        found = lora(immutable=True, tagged=tagged)
        assert not found.namespace.private
        assert not found.salt_adapters


def test_immutable_is_not_enough_where_keys_lack_the_path() -> None:
    assert lora(immutable=True, tagged=False, lora_path_in_keys=False).namespace.private
    assert lora(immutable=True, tagged=True, lora_path_in_keys=False).salt_adapters


@pytest.mark.parametrize("name", ["lora", "never_shared"])
def test_what_a_worker_could_not_find_out_is_not_taken_for_granted(name: str) -> None:
    without = facts()
    del without[name]
    assert resolve([without], cache_namespace="prod").namespace.private


def test_unknown_keys_of_adapters_are_not_taken_for_granted() -> None:
    without = facts(lora=True)
    del without["lora_path_in_keys"]
    assert resolve([without], lora_adapters_immutable=True).namespace.private


def test_base_model_shares_with_and_without_lora_enabled() -> None:
    assert lora(immutable=False, tagged=True).namespace.fingerprint == digits()


# --- manifest ----------------------------------------------------------------------------


def test_manifest_explains_every_field_and_reproduces_the_fingerprint() -> None:
    found = resolve(cache_namespace="prod").namespace
    stored = json.loads(json.dumps(found.manifest))
    check_manifest(found.fingerprint, stored)
    assert set(FACTS) <= set(stored["fields"])
    assert set(stored["meaning"]) == set(stored["fields"])
    assert stored["about"]["model"] == "/models/tiny"
    assert stored["about"]["hashing"] == FACTS_OF_RANK["hashing"]
    assert stored["fields"]["cache_namespace"] == "prod"


def test_private_manifest_says_why() -> None:
    found = resolve_namespace(None, LAYOUT).namespace
    assert found.manifest["about"]["private_because"]
    assert set(found.manifest["meaning"]) == set(found.manifest["fields"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m["fields"].update(dtype="float16"), "its fields give"),
        (lambda m: m["fields"].pop("weights"), "its fields give"),
        (lambda m: m.update(format=2), "format 2, not 1"),
        (lambda m: m.update(fields=[]), "its fields give"),
        (lambda m: m.clear(), "format None"),
    ],
)
def test_damaged_manifest_is_refused_in_one_line(damage: Any, message: str) -> None:
    found = resolve().namespace
    stored = json.loads(json.dumps(found.manifest))
    damage(stored)
    with pytest.raises(IdentityError, match=message) as refused:
        check_manifest(found.fingerprint, stored)
    assert "\n" not in str(refused.value)
    assert found.fingerprint in str(refused.value)


@pytest.mark.parametrize("stored", [None, [], "text", 3])
def test_manifest_that_is_no_object_is_refused(stored: object) -> None:
    with pytest.raises(IdentityError):
        check_manifest("0" * 40, stored)


# --- vLLM's configuration object ---------------------------------------------------------


class Bag:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_layout_of_reads_what_vllm_hands_to_a_spec() -> None:
    parallel = Bag(
        world_size=2,
        tp_size=2,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        is_parallelism_agnostic=True,
    )
    config = Bag(
        cache=Bag(tokens_per_hash=16, blocks_per_chunk=4),
        groups=(Bag(group_id=3, tokens_per_block=16, layer_names=("a", "b")),),
        parallel=parallel,
        model=Bag(name="org/name"),
        canonical_layout=False,
        replicated_layout=False,
    )
    found = identity.layout_of(config, 4096)
    assert found.groups == ({"id": 3, "tokens_per_block": 16, "layers": ["a", "b"]},)
    assert (found.world_size, found.blocks_per_chunk, found.chunk_bytes) == (2, 4, 4096)
    # vLLM claims portability of the direct layout too, which is not true of its bytes.
    assert not found.portable
    config.canonical_layout = True
    assert identity.layout_of(config, 4096).portable
