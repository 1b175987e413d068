# SPDX-License-Identifier: Apache-2.0
"""What `vllm_matrix.sh` needs beyond the shell: requirements, imports, the table."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
# The base has the torch that all CPU wheels pin; vLLM's text models need no other of these.
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def unmet(site: str) -> set[str]:
    """What the distributions in one folder require and the environment does not have."""
    found = set()
    for distribution in metadata.distributions(path=[site]):
        for text in distribution.requires or ():
            requirement = Requirement(text)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            left_out = canonicalize_name(requirement.name) in LEFT_OUT
            if wanted and not left_out and not satisfied(requirement):
                found.add(f"{requirement.name}{requirement.specifier}")
    return found


def satisfied(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def vllm_modules(package: Path) -> Iterator[str]:
    """The modules of vLLM that a package's sources import anywhere."""
    for source in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                if node.module.split(".")[0] == "vllm":
                    yield node.module
            elif isinstance(node, ast.Import):
                yield from (a.name for a in node.names if a.name.split(".")[0] == "vllm")


def own_modules(package: Path) -> Iterator[str]:
    for source in sorted(package.rglob("*.py")):
        parts = source.relative_to(package.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def not_importable(package: Path) -> dict[str, str]:
    """Module -> error, for all modules of vLLM that we name and all of our own."""
    failed = {}
    for name in sorted({*vllm_modules(package), *own_modules(package)}):
        try:
            importlib.import_module(name)
        except BaseException as error:  # a module may even call sys.exit
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return failed


def counts(results: Path) -> dict[str, int] | None:
    """Numbers of tests by outcome from pytest's XML; None when pytest wrote none."""
    if not results.exists():
        return None
    suite = next(ElementTree.parse(results).iter("testsuite"))
    total, *bad = (int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped"))
    return {
        "passed": total - sum(bad),
        "failed": bad[0] + bad[1],
        "skipped": bad[2],
    }


def cell(found: dict[str, int] | None, log: Path) -> tuple[str, bool]:
    """Text of a cell, and whether it is good: all passed, and there were some."""
    if found is None:
        return ("no result, see the log", False) if log.exists() else ("-", True)
    words = [f"{number} {name}" for name, number in found.items() if number]
    return ", ".join(words) or "no tests", found["passed"] > 0 and not found["failed"]


def show_table(results: Path, versions: list[str]) -> bool:
    from rich.console import Console
    from rich.table import Table

    table = Table("vLLM", "unit and contract", "end to end", "cannot be imported")
    good = True
    notes = []
    for version in versions:
        row = []
        for kind in ("contract", "e2e"):
            name = results / f"{version}.{kind}"
            text, fine = cell(counts(Path(f"{name}.xml")), Path(f"{name}.log"))
            good &= fine
            row.append(text)
        listed = results / f"{version}.imports.json"
        missing = json.loads(listed.read_text()) if listed.exists() else {"?": "see the log"}
        good &= "?" not in missing
        table.add_row(version, *row, str(len(missing) or "-"))
        notes += [f"{version}: {name}: {error}" for name, error in missing.items()]
    console = Console(width=110)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False)
    console.print(f"Logs: {results}", highlight=False)
    return good


def main(command: str, *arguments: str) -> int:
    if command == "unmet":
        for requirement in unmet(*arguments):
            print(requirement)
    elif command == "imports":
        failed = not_importable(REPOSITORY / "vllm_tiered_offload")
        Path(arguments[0]).write_text(json.dumps(failed))
    elif command == "table":
        return 0 if show_table(Path(arguments[0]), list(arguments[1:])) else 1
    else:
        raise SystemExit(f"unknown command {command!r}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
