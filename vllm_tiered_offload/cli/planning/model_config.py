# SPDX-License-Identifier: Apache-2.0
"""Finds a model's config.json: a file, a directory, or a name in the Hugging Face cache."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """No usable config.json; the message is one line and says what to do."""


def load_config(model: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The parsed config.json of `model`. Nothing is downloaded.

    Raises:
        ModelError: there is none, or it is not a JSON object.
    """
    path = find_config(model, environ)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"--model: {path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"--model: {path} is not a JSON object")
    return config


def find_config(model: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the config.json of `model` lies."""
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path
    cached = _in_hub_cache(model, environ)
    if cached is not None:
        return cached
    raise ModelError(
        f"--model: {model!r} is neither a directory with a config.json nor a model in the "
        f"Hugging Face cache; fetch it with: hf download {model} config.json"
    )


def _in_hub_cache(model: str, environ: Mapping[str, str]) -> Path | None:
    """The newest snapshot's config.json; `refs/main` is preferred where it is known."""
    home = environ.get("HF_HOME") or os.path.join(
        environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    repository = hub / f"models--{model.replace('/', '--')}"
    found = list(repository.glob("snapshots/*/config.json"))
    if not found:
        return None
    reference = repository / "refs" / "main"
    if reference.is_file():
        pinned = repository / "snapshots" / reference.read_text().strip() / "config.json"
        if pinned in found:
            return pinned
    return max(found, key=lambda path: path.stat().st_mtime)
