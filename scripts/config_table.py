# SPDX-License-Identifier: Apache-2.0
"""The tables of configuration keys for the README, generated from the settings.

python scripts/config_table.py            print the tables
python scripts/config_table.py --write    put them between the markers in README.md
python scripts/config_table.py --check    exit 1 if README.md has others
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).parent))
import _page

from vllm_tiered_offload.config import FsTierSettings, SpecSettings, format_size
from vllm_tiered_offload.config.model import rule_of
from vllm_tiered_offload.config.rules import Object, Untouched

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN = "<!-- config-table:begin (scripts/config_table.py --write) -->"
END = "<!-- config-table:end -->"


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if field.default is None or field.default == ():
        return "-"
    if rule_of(field).unit == "bytes":
        return f"`{json.dumps(format_size(field.default))}`"
    if isinstance(field.default, float):
        return f"`{field.default:g}`"
    return f"`{json.dumps(field.default)}`"


def is_vllms(field: FieldInfo) -> bool:
    return isinstance(rule_of(field), Untouched | Object)


def row(name: str, field: FieldInfo) -> str:
    rule = rule_of(field)
    columns = (rule.unit or "-", default_of(field), rule.allowed, field.description)
    return f"| `{name}` | {' | '.join(str(column) for column in columns)} |"


def spec_rows() -> Iterator[str]:
    for name, field in SpecSettings.model_fields.items():
        if not is_vllms(field):
            yield row(name, field)


def vllm_rows() -> Iterator[str]:
    for name, field in SpecSettings.model_fields.items():
        if is_vllms(field):
            yield f"| `{name}` | {field.description} |"


def tables() -> str:
    head = ["| key | unit | default | allowed | what it does |", "|---|---|---|---|---|"]
    lines = ["Keys of `kv_connector_extra_config`:", "", *head]
    lines += spec_rows()
    lines += ["", 'Keys of a tier with `"type": "odirect_fs"`:', "", *head]
    lines += (row(name, field) for name, field in FsTierSettings.model_fields.items())
    lines += [
        "",
        "Read by vLLM itself and passed on untouched:",
        "",
        "| key of `kv_connector_extra_config` | what it does |",
        "|---|---|",
        *vllm_rows(),
        "",
        'Sizes are bytes or strings with a unit: `"32GiB"` (1024), `"500GB"` (1000). '
        "Unknown keys are refused.",
    ]
    return "\n".join(lines)


def main() -> None:
    stale = "README.md: the tables of keys are stale; run scripts/config_table.py --write"
    _page.main(__doc__, README, (BEGIN, END), tables, stale)


if __name__ == "__main__":
    main()
