# SPDX-License-Identifier: Apache-2.0
"""A whole `--kv-transfer-config`, checked as far as it can be without vLLM.

An engine stops at the first thing it does not like, and only once the model is loaded;
here all of them are found at once. The names are those of vLLM 0.30 to 0.33.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tiered_offload.config.fs_tier import FsTierSettings, is_fs_tier
from vllm_tiered_offload.config.model import nearest, rule_of, suggest, unknown_keys
from vllm_tiered_offload.config.rules import ConfigError, Object, Untouched, show
from vllm_tiered_offload.config.spec import (
    CPU_SPEC,
    PREFIX,
    TIERING_ONLY,
    TIERING_SPEC,
    SpecSettings,
    tier_prefix,
    tiers_of,
)

STOCK_CONNECTOR, OUR_CONNECTOR = "OffloadingConnector", "TieredOffloadingConnector"
_MULTI = "MultiConnector"
_CONNECTOR_MODULE = "vllm_tiered_offload.connector"
_SPEC_MODULES = {
    TIERING_SPEC: "vllm_tiered_offload.spec.tiering",
    CPU_SPEC: "vllm_tiered_offload.spec.cpu",
}
_STOCK_TIERING_SPEC, _STOCK_CPU_SPEC = "TieringOffloadingSpec", "CPUOffloadingSpec"
_SPECS = (*_SPEC_MODULES, _STOCK_TIERING_SPEC, _STOCK_CPU_SPEC)
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_TIER_TYPES = ("odirect_fs", "example", "fs", "obj", "p2p", "kvcr")
_EXTRA = "kv_connector_extra_config"
_FIELDS = (
    "kv_connector",
    "kv_role",
    _EXTRA,
    "engine_id",
    "kv_buffer_device",
    "kv_port",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)
_FIELDS_BEFORE_0_32 = ("kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip")


@dataclass(slots=True)
class Transfer:
    """What was found. `problems` stop an engine; with `doubts` it runs, but hardly as meant.

    `settings` are there for a spec of ours, unless a value is bad; `tiers` are the
    `odirect_fs` entries without a bad value.
    """

    settings: SpecSettings | None = None
    tiers: list[FsTierSettings] = dataclasses.field(default_factory=list)
    problems: list[ConfigError] = dataclasses.field(default_factory=list)
    doubts: list[ConfigError] = dataclasses.field(default_factory=list)

    def take(self, inner: Transfer, prefix: str) -> None:
        """Add what was found in an object inside this one."""
        self.settings = self.settings or inner.settings
        self.tiers += inner.tiers
        for mine, its in ((self.problems, inner.problems), (self.doubts, inner.doubts)):
            mine += [ConfigError(prefix + error.key, error.problem) for error in its]

    def problem(self, key: str, text: str) -> None:
        self.problems.append(ConfigError(key, text))

    def doubt(self, key: str, text: str) -> None:
        self.doubts.append(ConfigError(key, text))


def read_transfer(
    document: Mapping[str, Any], kv_offloading_size: float | None = None
) -> Transfer:
    """Check a whole configuration, or its `kv_connector_extra_config` alone.

    `kv_offloading_size` (GiB) is vLLM's option of that name: it overrides three keys.
    """
    for name in ("kv_transfer_config", "kv-transfer-config"):
        if isinstance(document.get(name), Mapping):
            return read_transfer(document[name], kv_offloading_size)
    found = Transfer()
    if document and not any(name in document for name in _FIELDS):
        found.doubt(
            "kv_connector",
            f"and kv_role are not there to be checked; give the object that holds {_EXTRA!r}",
        )
        _check_extra(found, _with_size(document, kv_offloading_size), None)
    else:
        _check_whole(found, document, kv_offloading_size)
    return found


def _with_size(extra: Mapping[str, Any], gib: float | None) -> Mapping[str, Any]:
    return extra if gib is None else {**extra, "cpu_bytes_to_use": gib * (1 << 30)}


def _check_whole(
    found: Transfer, document: Mapping[str, Any], kv_offloading_size: float | None = None
) -> None:
    for name in document:
        if name in _FIELDS_BEFORE_0_32:
            found.doubt(str(name), "is refused by vLLM 0.32 and newer; leave it out")
    document = {k: v for k, v in document.items() if k not in _FIELDS_BEFORE_0_32}
    found.problems += unknown_keys(document, _FIELDS, "")
    # A misspelt key is reported once, and its value is looked at as what was meant.
    meant = {nearest(name, _FIELDS): value for name, value in document.items()}
    document = {name: document.get(name, meant.get(name)) for name in _FIELDS}
    if kv_offloading_size is not None:
        document |= {"kv_connector": STOCK_CONNECTOR, "kv_role": "kv_both"}
    _check_connector(found, document)
    _check_role(found, document["kv_role"])
    connector, extra = document["kv_connector"], document[_EXTRA]
    if not isinstance(extra, Mapping):
        problem = "is missing" if extra is None else f"{show(extra)} is not an object"
        found.problem(_EXTRA, f"{problem}; give an object with spec_name in it")
    elif connector == _MULTI:
        _check_children(found, extra)
    elif not _is_others(document):
        _check_extra(found, _with_size(extra, kv_offloading_size), connector)


def _is_others(document: Mapping[str, Any]) -> bool:
    """Whether the connector comes from a module of somebody else, who knows its keys."""
    module = document.get("kv_connector_module_path")
    return isinstance(module, str) and not _is_ours(module)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "vllm_tiered_offload"


def _check_connector(found: Transfer, document: Mapping[str, Any]) -> None:
    name, key = document.get("kv_connector"), "kv_connector"
    module = document.get("kv_connector_module_path")
    known = (STOCK_CONNECTOR, OUR_CONNECTOR, _MULTI)
    if name is None:
        found.problem(key, f"is missing; give {STOCK_CONNECTOR!r}")
    elif module is not None and _is_others(document):
        _check_package(found, module, f"{key}_module_path")
    elif module is not None and (module, name) != (_CONNECTOR_MODULE, OUR_CONNECTOR):
        found.problem(
            f"{key}_module_path",
            f"{show(module)} must be {_CONNECTOR_MODULE!r}, with kv_connector "
            f"{OUR_CONNECTOR!r}; or leave it out",
        )
    elif name not in known:
        found.problem(
            key, f"{show(name)} does not offload to tiers; {suggest(name, known, 'names')}"
        )


def _check_role(found: Transfer, role: Any) -> None:
    if role is None:
        found.problem("kv_role", f"is missing; give {_ROLES[0]!r}")
    elif role not in _ROLES:
        found.problem(
            "kv_role", f"{show(role)} is not a role; {suggest(role, _ROLES, 'roles')}"
        )


def _check_children(found: Transfer, extra: Mapping[str, Any]) -> None:
    """The connectors in a MultiConnector; those that are not ours to know are left alone."""
    children = extra.get("connectors")
    if not isinstance(children, list):
        found.problem(f"{PREFIX}connectors", "is missing; give a list of connectors")
        return
    ours = 0
    for index, child in enumerate(children):
        prefix = f"connectors[{index}]."
        if not isinstance(child, Mapping):
            found.problem(prefix.rstrip("."), f"{show(child)} is not an object; give one")
        elif child.get("kv_connector") in (None, STOCK_CONNECTOR, OUR_CONNECTOR):
            inner = Transfer()
            _check_whole(inner, child)
            found.take(inner, prefix)
            ours += 1
    if not ours:
        found.doubt(f"{PREFIX}connectors", f"has none that offloads; add {STOCK_CONNECTOR!r}")


def _check_extra(found: Transfer, extra: Mapping[str, Any], connector: Any) -> None:
    name = _check_spec(found, extra, connector)
    if name in _SPEC_MODULES:
        found.settings, problems = SpecSettings.try_parse(extra, tiering=name == TIERING_SPEC)
        found.problems += problems
        chosen = connector == OUR_CONNECTOR or "spec_name" in extra
        if (
            name == TIERING_SPEC
            and chosen
            and not problems
            and not extra.get("secondary_tiers")
        ):
            found.doubt(
                f"{PREFIX}secondary_tiers",
                "is missing or empty, so that nothing goes to disk; add a tier, or take "
                f"{CPU_SPEC!r}",
            )
    elif name in _SPECS:
        _check_stock_keys(found, extra, name)
    for index, tier in tiers_of(extra):
        _check_tier(found, tier, tier_prefix(index))
        if name == _STOCK_TIERING_SPEC and is_fs_tier(tier) and "cache_namespace" not in tier:
            found.doubt(
                f"{tier_prefix(index)}cache_namespace",
                f"is missing, so that the cache ends with the engine: {name} hides the model; "
                "name the model and its weights here",
            )


def _check_spec(found: Transfer, extra: Mapping[str, Any], connector: Any) -> str | None:
    """The spec whose keys `extra` holds; None where that is unknown here."""
    name, module = extra.get("spec_name"), extra.get("spec_module_path")
    key = f"{PREFIX}spec_name"
    if name is None:
        if connector != OUR_CONNECTOR:
            note = found.doubt if connector is None else found.problem
            note(key, f"is missing, so that vLLM takes its own; give {TIERING_SPEC!r}")
        return TIERING_SPEC
    if module is not None and not (isinstance(module, str) and _is_ours(module)):
        _check_package(found, module, f"{PREFIX}spec_module_path")
        return name if name in _SPECS else None
    if name not in _SPECS:
        found.problem(
            key, f"{show(name)} is not a known spec; {suggest(name, _SPECS, 'specs')}"
        )
        return nearest(name, _SPECS) or TIERING_SPEC
    if module is not None and _SPEC_MODULES.get(name) != module:
        right = _SPEC_MODULES.get(name)
        problem = f"must be {right!r}" if right else "leave it out"
        found.problem(f"{PREFIX}spec_module_path", f"{show(module)} has no {name}; {problem}")
    return str(name)


def _check_stock_keys(found: Transfer, extra: Mapping[str, Any], name: str) -> None:
    """vLLM's own specs: no units, none of our keys, and a model that tiers cannot see."""
    tiering = name == _STOCK_TIERING_SPEC
    found.problems += SpecSettings.try_parse(extra, tiering=tiering)[1]
    size = extra.get("cpu_bytes_to_use")
    if isinstance(size, str) and not size.strip().isdecimal():
        found.problem(
            f"{PREFIX}cpu_bytes_to_use",
            f"{show(size)} has a unit, which {name} does not know; give bytes as a number",
        )
    for ours in _own_keys():
        if ours in extra and (tiering or ours not in TIERING_ONLY):
            found.problem(
                f"{PREFIX}{ours}", f"is not used by {name}; it needs spec_name {TIERING_SPEC!r}"
            )


def _own_keys() -> list[str]:
    """Keys that only our specs read."""
    return [
        name
        for name, field in SpecSettings.model_fields.items()
        if not isinstance(rule_of(field), Untouched | Object)
        and name not in ("cpu_bytes_to_use", "secondary_tiers")
    ]


def _check_tier(found: Transfer, tier: Mapping[str, Any], prefix: str) -> None:
    kind, module, root = tier.get("type"), tier.get("module_path"), tier.get("root_dir")
    if is_fs_tier(tier):
        settings, _ = FsTierSettings.try_parse(tier, prefix)
        found.tiers += [settings] if settings is not None else []
    elif module is not None:
        _check_package(found, module, f"{prefix}module_path")
    elif kind == "fs" and root is None:
        found.problem(f"{prefix}root_dir", "is missing; give an absolute path")
    elif kind == "fs" and not str(root).startswith("/"):
        found.doubt(
            f"{prefix}root_dir",
            f"{show(root)} depends on where vLLM is started; give an absolute path",
        )
    elif isinstance(kind, str) and kind not in _TIER_TYPES and not _reported(found, prefix):
        found.doubt(
            f"{prefix}type",
            f"{show(kind)} is neither ours nor vLLM's; {suggest(kind, _TIER_TYPES, 'types')}",
        )


def _reported(found: Transfer, prefix: str) -> bool:
    return any(error.key == f"{prefix}type" for error in found.problems)


def _check_package(found: Transfer, module: Any, key: str) -> None:
    """Somebody else's module: whether its package is there. Nothing is imported."""
    if not isinstance(module, str) or not module.replace(".", "_").isidentifier():
        found.problem(key, f"{show(module)} is not a module; give one such as 'package.module'")
    elif importlib.util.find_spec(module.partition(".")[0]) is None:
        found.doubt(key, f"{show(module)} is not installed here; install it beside vLLM")
