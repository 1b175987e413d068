# SPDX-License-Identifier: Apache-2.0
"""What both kinds of settings share: rules at the fields, one-line errors, suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from vllm_tiered_offload.config.rules import ConfigError, Rule, show

S = TypeVar("S", bound="Settings")


def key(rule: Rule, description: str, default: Any = PydanticUndefined) -> Any:
    """A field that `rule` checks; without a default the key is required."""
    return Field(default, description=description, json_schema_extra={"rule": rule})  # type: ignore[dict-item]


def rule_of(field: FieldInfo) -> Rule:
    """The rule given to `key` for this field."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return extra["rule"]  # type: ignore[return-value]


class Settings(BaseModel):
    """Frozen settings whose fields are made by `key`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_by_rule(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        if value is None and not field.is_required() and field.default is None:
            return None
        return rule_of(field).check(value)


def try_build(
    cls: type[S], values: Mapping[str, Any], prefix: str
) -> tuple[S | None, list[ConfigError]]:
    """`cls` from what the user typed, and everything that is wrong with it.

    Unknown keys are left out; with a bad value there are no settings. Each problem is one
    line "<prefix><key>: ...".
    """
    if not isinstance(values, Mapping):
        name = prefix.rstrip(".") or "settings"
        return None, [ConfigError(name, f"{show(values)} is not an object")]
    fields = cls.model_fields
    problems = unknown_keys(values, fields, prefix)
    meant = {nearest(name, fields) for name in values if name not in fields}
    try:
        return cls.model_validate({k: v for k, v in values.items() if k in fields}), problems
    except ValidationError as error:
        # Pydantic's own text spans lines and ends in a link to its site.
        for detail in error.errors(include_url=False):
            if detail["type"] != "missing" or detail["loc"][0] not in meant:
                problems.append(_as_config_error(cls, detail, prefix))
    return None, problems


def _as_config_error(cls: type[S], detail: ErrorDetails, prefix: str) -> ConfigError:
    name = prefix + ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        rule = rule_of(cls.model_fields[str(detail["loc"][0])])
        return ConfigError(name, f"is missing; give {rule.allowed} ({rule.unit})")
    problem = str(detail.get("ctx", {}).get("error", detail["msg"]))
    return ConfigError(name, f"{show(detail['input'])} {problem}")


def unknown_keys(given: Iterable[Any], known: Iterable[str], prefix: str) -> list[ConfigError]:
    """A ConfigError for every key of `given` that is not in `known`."""
    names = list(known)
    return [
        ConfigError(f"{prefix}{name}", f"is not a known key; {suggest(name, names, 'keys')}")
        for name in given
        if name not in names
    ]


def suggest(name: object, known: Iterable[str], what: str) -> str:
    """What `name` should have been: the nearest of the `known`, else all of them."""
    names = list(known)
    near = nearest(name, names)
    return f"did you mean '{near}'?" if near else f"known {what}: {', '.join(names)}"


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The one of `known` that somebody who typed `name` probably meant."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)), None)


def raise_first(problems: Iterable[ConfigError]) -> None:
    """An engine stops with one line; `doctor` shows them all."""
    for problem in problems:
        raise problem
