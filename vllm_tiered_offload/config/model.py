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


def build(cls: type[S], values: Mapping[str, Any], prefix: str) -> S:
    """`cls` from what the user typed.

    Raises:
        ConfigError: for the first bad key; its text is one line "<prefix><key>: ...".
    """
    if not isinstance(values, Mapping):
        raise ConfigError(prefix.rstrip(".") or "settings", f"{show(values)} is not an object")
    refuse_unknown(values, cls.model_fields, prefix)
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        # Pydantic's own text spans lines and ends in a link to its site.
        raise _as_config_error(cls, error.errors(include_url=False)[0], prefix) from None


def _as_config_error(cls: type[S], detail: ErrorDetails, prefix: str) -> ConfigError:
    name = prefix + ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        rule = rule_of(cls.model_fields[str(detail["loc"][0])])
        return ConfigError(name, f"is missing; give {rule.allowed} ({rule.unit})")
    problem = str(detail.get("ctx", {}).get("error", detail["msg"]))
    return ConfigError(name, f"{show(detail['input'])} {problem}")


def refuse_unknown(given: Iterable[Any], known: Iterable[str], prefix: str) -> None:
    """Raise ConfigError for the first key of `given` that is not in `known`."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(names)}"
            raise ConfigError(f"{prefix}{name}", f"is not a known key; {hint}")
