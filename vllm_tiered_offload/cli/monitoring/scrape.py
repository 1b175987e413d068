# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format, as far as counters and gauges go."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?", re.ASCII)
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_LONGEST = 64 << 20

Labels = Mapping[str, str]


class ScrapeError(OSError):
    """No metrics from there; one line."""


@dataclass(frozen=True)
class Sample:
    """All series at one moment; `at` is seconds of a monotonic clock."""

    at: float
    series: Mapping[str, list[tuple[Labels, float]]]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all series of this name that carry these labels; 0 where there is none."""
        return sum(
            value
            for found, value in self.series.get(name, ())
            if all(found.get(key) == wanted for key, wanted in labels.items())
        )

    def values(self, name: str, label: str) -> list[str]:
        """The values that a label takes, in order of appearance."""
        found = (labels.get(label) for labels, _ in self.series.get(name, ()))
        return list(dict.fromkeys(value for value in found if value is not None))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.series.get(name, ()):
            sums[labels.get(label, "")] += value
        return dict(sums)


def scrape(url: str, timeout: float = 5.0) -> Sample:
    """The metrics of a server.

    Raises:
        ScrapeError: out of reach, or what is there is not a vLLM server.
    """
    address = metrics_url(url)
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer:
            text = answer.read(_LONGEST).decode("utf-8", "replace")
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ScrapeError(f"{address}: {reason}; is the server up, and --url right?") from None
    sample = parse(text, time.monotonic())
    if not any(name.startswith("vllm:") for name in sample.series):
        raise ScrapeError(f"{address}: no metrics of vLLM there")
    return sample


def metrics_url(url: str) -> str:
    """`localhost:8000` and `http://host/` become the address of /metrics."""
    if "://" not in url:
        url = f"http://{url}"
    if urlsplit(url).scheme not in ("http", "https"):
        raise ScrapeError(f"--url: {url!r} is not an http address")
    return url if urlsplit(url).path not in ("", "/") else f"{url.rstrip('/')}/metrics"


def parse(text: str, at: float) -> Sample:
    """Series of an exposition; lines that are none are passed over."""
    series: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.fullmatch(line.strip())
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = {key: _unescape(quoted) for key, quoted in _LABEL.findall(match[2] or "")}
        series[match[1]].append((labels, value))
    return Sample(at, dict(series))


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), text)
