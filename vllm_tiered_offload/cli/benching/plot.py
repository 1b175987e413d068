# SPDX-License-Identifier: Apache-2.0
"""A chart of a benchmark, for those who installed the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_tiered_offload.cli.benching.measure import WHO, Measure
from vllm_tiered_offload.cli.output import human_bytes

_COLOURS = {WHO: "#1f77b4", "fio": "#b0b0b0"}


def require_matplotlib() -> None:
    """Before minutes are spent on measuring. Raises ValueError: how to install it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib: pip install 'vllm-tiered-offload[plot]'"
        ) from None


def plot(measures: Sequence[Measure], title: str, file: Path) -> None:
    """Bars of GB/s by chunk size, one panel a direction."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for panel, direction in zip(panels, ("store", "load"), strict=True):
        own = [measure for measure in measures if measure.direction == direction]
        sizes = sorted({measure.chunk_bytes for measure in own})
        contestants = list(dict.fromkeys(measure.who for measure in own))
        width = 0.8 / max(1, len(contestants))
        for number, who in enumerate(contestants):
            bars = {m.chunk_bytes: m.gb_per_second for m in own if m.who == who}
            places = [index + number * width for index in range(len(sizes))]
            heights = [bars.get(size, 0.0) for size in sizes]
            panel.bar(places, heights, width, label=who, color=_COLOURS.get(who))
        middle = width * (len(contestants) - 1) / 2
        panel.set_xticks([index + middle for index in range(len(sizes))])
        panel.set_xticklabels([human_bytes(size) for size in sizes])
        panel.set_title(direction)
        panel.set_xlabel("chunk")
    panels[0].set_ylabel("GB/s")
    panels[0].legend(frameon=False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
