# SPDX-License-Identifier: Apache-2.0
"""`top`: a live view of a running engine's tiers, from its /metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live

from vllm_tiered_offload.cli.monitoring.scrape import Sample, ScrapeError, scrape
from vllm_tiered_offload.cli.monitoring.summary import Summary, summarize
from vllm_tiered_offload.cli.monitoring.view import render
from vllm_tiered_offload.cli.output import JsonOption, console, print_json, reports_errors


@reports_errors
def top(
    *,
    url: Annotated[
        str, typer.Option(help="The server, or its /metrics.")
    ] = "http://localhost:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
    count: Annotated[int, typer.Option(min=0, help="Stop after so many looks; 0: never.")] = 0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, print and stop; --json implies it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch hit rates, GB/s, residency, queues and evictions of a running engine."""
    before = scrape(url)
    if once or as_json:
        time.sleep(interval)
        view = summarize(before, scrape(url))
        if as_json:
            print_json(view.as_json())
        else:
            console().print(render(view, url))
        return
    _watch(before, url, interval, count)


def _watch(before: Sample, url: str, interval: float, count: int) -> None:
    """Redraws until interrupted. A server out of reach keeps the last numbers and says so."""
    view: Summary = summarize(before, before)
    looks, problem, out = 0, "", console()
    with contextlib.ExitStack() as stack:
        show: Callable[[RenderableType], None] = out.print  # in a pipe one after the other
        if out.is_terminal:
            live = Live(render(view, url), console=out, auto_refresh=False, screen=True)
            show = partial(stack.enter_context(live).update, refresh=True)
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        while count == 0 or looks < count:
            time.sleep(interval)
            problem = ""
            try:
                now = scrape(url)
                view, before = summarize(before, now), now
            except ScrapeError as error:
                problem = str(error)
            show(render(view, url, problem))
            looks += 1
    if out.is_terminal:  # the screen is gone, the last look stays
        out.print(render(view, url, problem))
