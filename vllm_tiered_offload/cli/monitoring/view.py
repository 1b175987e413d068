# SPDX-License-Identifier: Apache-2.0
"""What `top` draws."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vllm_tiered_offload.cli.monitoring.summary import RootView, Summary
from vllm_tiered_offload.cli.output import bar, human_bytes, human_count, human_seconds, table

_BAR = 20


def render(view: Summary, url: str, problem: str = "") -> Group:
    """The whole screen. `problem`: why the last look failed; the numbers are then old."""
    parts: list[RenderableType] = [
        Text.from_markup(
            f"[bold]{escape(view.model or 'vLLM')}[/]  {escape(url)}  over {view.seconds:.1f} s"
        )
    ]
    if problem:
        parts.append(Text.from_markup(f"[bold red]{escape(problem)}[/]"))
    parts.append(_lookups(view))
    if view.has_tier:
        parts.append(Text())
        parts += [Text.from_markup(_root(root)) for root in view.roots]
    else:
        parts.append(
            Text.from_markup(
                "\n[yellow]no odirect_fs tier in this engine's metrics[/] (before its first "
                "request, or no --kv-transfer-config with one)"
            )
        )
    parts += [Text(), _traffic(view)]
    return Group(*parts)


def _lookups(view: Summary) -> Table:
    rows = table(["look-ups in", ">a second", "", ">hit", ">since start"])
    for lookups in view.lookups:
        rows.add_row(
            escape(lookups.place),
            human_count(lookups.queries_per_second),
            lookups.unit,
            _percent(lookups.hit_rate),
            _percent(lookups.hit_rate_since_start),
        )
    return rows


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _root(root: RootView) -> str:
    """Three lines: a table with all of this would be wider than a terminal."""
    full = f"{human_bytes(root.resident_bytes):>9}"
    if root.capacity_bytes:
        share = root.resident_bytes / root.capacity_bytes
        full += f" {bar(share, _BAR)} {share:>4.0%} of {human_bytes(root.capacity_bytes)}"
    return (
        f"[bold]{escape(root.path)}[/]  {_state(root)}\n"
        f"{full}, {human_count(root.chunks)} chunks, {human_bytes(root.free_bytes)} free\n"
        f"  written {_per_second(root.written_per_second):>9}"
        f"   read {_per_second(root.read_per_second):>9}"
        f"   evicted {_per_second(root.evicted_per_second):>9}"
    )


def _per_second(rate: float) -> str:
    if not rate:
        return "-"
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"


def _state(root: RootView) -> str:
    words = ["direct" if root.direct_read and root.direct_write else "[yellow]buffered[/]"]
    if root.paused:
        words.append("[yellow]stores paused[/]")
    if root.stalled:
        words.append("[bold red]stalled[/]")
    if root.oldest_seconds >= 1:
        words.append(f"oldest operation {human_seconds(root.oldest_seconds)}")
    if root.checksum_failures:
        words.append(f"[red]{root.checksum_failures:.0f} checksum failures[/]")
    if root.io_errors:
        words.append(f"[red]{root.io_errors:.0f} I/O errors[/]")
    return ", ".join(words)


def _traffic(view: Summary) -> Table:
    rows = table(["", ">", ""])
    rows.show_header = False
    rows.add_row("CPU to GPU", _per_second(view.load_per_second), "")
    rows.add_row("GPU to CPU", _per_second(view.store_per_second), "")
    rows.add_row("pool pinned", f"{view.pool_pinned:.0%}", "by transfers under way")
    if view.has_tier:
        rows.add_row(
            "queue", f"{view.queue_jobs:.0f} jobs", f"{human_bytes(view.queue_bytes)} to store"
        )
    if view.dropped:
        rows.add_row("not stored", *_reasons(view.dropped))
    if view.failed:
        rows.add_row("[red]not served[/]", *_reasons(view.failed))
    if view.promotion_failures:
        rows.add_row("pool full", f"{view.promotion_failures:.0f}", "reads that found no room")
    if view.never_hit:
        rows.add_row("[yellow]no hits[/]", "", "much is stored and nothing is ever found again")
    return rows


def _reasons(counts: dict[str, float]) -> tuple[str, str]:
    total = sum(counts.values())
    parts = sorted(counts.items(), key=lambda item: -item[1])
    return f"{total:.0f}", ", ".join(f"{reason} {count:.0f}" for reason, count in parts)
