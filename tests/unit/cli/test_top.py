# SPDX-License-Identifier: Apache-2.0
"""top: the text format, the sums, the screen, and servers that go away."""

import http.server
import json
import threading
from contextlib import contextmanager

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_tiered_offload.cli.main import app
from vllm_tiered_offload.cli.monitoring.scrape import ScrapeError, metrics_url, parse, scrape
from vllm_tiered_offload.cli.monitoring.summary import summarize
from vllm_tiered_offload.cli.monitoring.view import render

ENGINE = 'engine="0",model_name="org/name"'
ROOT = f'{ENGINE},tier="1:odirect_fs",root="/nvme/kv"'


def metrics(scale: float = 1.0, **replaced: float) -> str:
    """What a server with one tier and one root says; counters grow with `scale`."""
    values = {
        "resident": 30e9,
        "paused": 0,
        "stalled": 0,
        "direct": 1,
        "oldest": 0,
        "checksum": 0,
        "never": 0,
        "free": 1e12,
        "chunks": 15000,
        **replaced,
    }
    tier = "vllm:kv_offload_odirect_"
    return f"""\
# HELP vllm:prefix_cache_queries_total Prefix cache queries
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{{ENGINE}}} {1000 * scale}
vllm:prefix_cache_hits_total{{{ENGINE}}} {250 * scale}
vllm:external_prefix_cache_queries_total{{{ENGINE}}} {750 * scale}
vllm:external_prefix_cache_hits_total{{{ENGINE}}} {600 * scale}
vllm:kv_offload_tiering_chunk_queries_total{{{ENGINE},tier="0:cpu"}} {100 * scale}
vllm:kv_offload_tiering_chunk_hits_total{{{ENGINE},tier="0:cpu"}} {25 * scale}
vllm:kv_offload_tiering_chunk_queries_total{{{ENGINE},tier="1:odirect_fs"}} {75 * scale}
vllm:kv_offload_tiering_chunk_hits_total{{{ENGINE},tier="1:odirect_fs"}} {75 * scale}
vllm:kv_offload_load_bytes_total{{{ENGINE}}} {4e9 * scale}
vllm:kv_offload_store_bytes_total{{{ENGINE}}} {2e9 * scale}
vllm:kv_offload_cpu_cache_usage_perc{{{ENGINE}}} 0.25
{tier}resident_bytes{{{ROOT}}} {values["resident"]}
{tier}capacity_bytes{{{ROOT}}} 60e9
{tier}resident_chunks{{{ROOT}}} {values["chunks"]}
{tier}free_bytes{{{ROOT}}} {values["free"]}
{tier}oldest_operation_seconds{{{ROOT}}} {values["oldest"]}
{tier}stores_paused{{{ROOT}}} {values["paused"]}
{tier}stalled{{{ROOT}}} {values["stalled"]}
{tier}direct_io{{{ROOT},direction="read"}} {values["direct"]}
{tier}direct_io{{{ROOT},direction="write"}} 1
{tier}read_bytes_total{{{ROOT}}} {3e9 * scale}
{tier}written_bytes_total{{{ROOT}}} {1e9 * scale}
{tier}evicted_bytes_total{{{ROOT}}} {5e8 * scale}
{tier}checksum_failures_total{{{ROOT}}} {values["checksum"]}
{tier}queue_jobs{{{ENGINE},tier="1:odirect_fs"}} 3
{tier}queue_bytes{{{ENGINE},tier="1:odirect_fs"}} 1048576
{tier}dropped_chunks_total{{{ENGINE},tier="1:odirect_fs",reason="queue"}} {4 * scale}
{tier}dropped_chunks_total{{{ENGINE},tier="1:odirect_fs",reason="full"}} 0
{tier}stores_never_hit{{{ENGINE},tier="1:odirect_fs"}} {values["never"]}
"""


def seen(before: str, now: str, seconds: float = 2.0):
    return summarize(parse(before, 10.0), parse(now, 10.0 + seconds))


def drawn(view, problem: str = "", width: int = 160) -> str:
    out = Console(width=width, record=True, file=open("/dev/null", "w"))
    out.print(render(view, "http://here/metrics", problem))
    return out.export_text()


class TestParsing:
    def test_escapes_and_oddities(self):
        sample = parse(
            "\n".join(
                [
                    "# HELP a:b text",
                    r'a:b{path="/x \"y\" \\z",other="1,2}"} 1.5e3 1700000000000',
                    "plain 2",
                    'nan_value{a="b"} NaN',
                    "inf +Inf",
                    "not a metric line at all",
                    "broken{a=} x",
                ]
            ),
            0.0,
        )
        ((labels, value),) = sample.series["a:b"]
        assert labels == {"path": r"/x " + '"y"' + r" \z", "other": "1,2}"}
        assert value == 1500.0
        assert sample.total("plain") == 2
        assert sample.total("inf") == float("inf")
        assert sample.total("absent") == 0

    def test_sums_over_engines(self):
        sample = parse('m{engine="0",r="a"} 1\nm{engine="1",r="a"} 2\nm{engine="1",r="b"} 4', 0)
        assert sample.total("m") == 7
        assert sample.total("m", r="a") == 3
        assert sample.by("m", "r") == {"a": 3, "b": 4}
        assert sample.values("m", "engine") == ["0", "1"]

    @pytest.mark.parametrize(
        ("given", "address"),
        [
            ("localhost:8000", "http://localhost:8000/metrics"),
            ("http://host/", "http://host/metrics"),
            ("https://host:1/custom", "https://host:1/custom"),
        ],
    )
    def test_addresses(self, given, address):
        assert metrics_url(given) == address

    def test_only_http(self):
        with pytest.raises(ScrapeError, match="not an http address"):
            metrics_url("file:///etc/passwd")


class TestSummary:
    def test_rates_are_between_two_looks(self):
        view = seen(metrics(1), metrics(2))
        (root,) = view.roots
        assert root.path == "/nvme/kv"
        assert root.read_per_second == 1.5e9
        assert root.written_per_second == 0.5e9
        assert root.evicted_per_second == 0.25e9
        assert view.load_per_second == 2e9
        assert view.model == "org/name"

    def test_hit_rates_by_place(self):
        places = {lookups.place: lookups for lookups in seen(metrics(1), metrics(3)).lookups}
        assert places["GPU prefix cache"].hit_rate == 0.25
        assert places["offloaded"].hit_rate == 0.8
        assert places["0:cpu"].hit_rate == 0.25
        assert places["1:odirect_fs"].hit_rate == 1.0
        assert places["0:cpu"].queries_per_second == 100

    def test_nothing_happened(self):
        view = seen(metrics(1), metrics(1))
        assert {lookups.hit_rate for lookups in view.lookups} == {None}
        assert view.lookups[0].hit_rate_since_start == 0.25

    def test_an_engine_started_anew_counts_from_zero(self):
        view = seen(metrics(5), metrics(1))
        assert view.roots[0].read_per_second == 1.5e9
        assert all(lookups.queries_per_second >= 0 for lookups in view.lookups)

    def test_two_looks_at_one_moment(self):
        assert seen(metrics(1), metrics(2), seconds=0).load_per_second == 0.0

    def test_reasons_at_zero_are_left_out(self):
        assert seen(metrics(1), metrics(1)).dropped == {"queue": 4}


class TestScreen:
    def test_a_healthy_engine(self):
        text = drawn(seen(metrics(1), metrics(2)))
        for words in ("org/name", "/nvme/kv", "50%", "1.50 GB/s", "direct", "3 jobs", "80.0%"):
            assert words in text
        assert "stalled" not in text

    @pytest.mark.parametrize(
        ("replaced", "words"),
        [
            ({"paused": 1}, "stores paused"),
            ({"stalled": 1, "oldest": 12}, "oldest operation 12 s"),
            ({"direct": 0}, "buffered"),
            ({"checksum": 2}, "2 checksum failures"),
            ({"never": 1}, "nothing is ever found again"),
        ],
    )
    def test_trouble_is_said(self, replaced, words):
        assert words in drawn(seen(metrics(1), metrics(1, **replaced)))

    def test_80_columns_are_enough(self):
        text = drawn(seen(metrics(1), metrics(2, free=999e12, chunks=999e9)), width=80)
        wide = drawn(seen(metrics(1), metrics(2, free=999e12, chunks=999e9)))
        assert text == wide  # nothing was folded or cut
        assert max(map(len, text.splitlines())) <= 80

    def test_an_engine_without_the_tier(self):
        text = 'vllm:prefix_cache_queries_total{model_name="m"} 5\n'
        assert "no odirect_fs tier" in drawn(seen(text, text))

    def test_a_server_out_of_reach(self):
        assert "refused" in drawn(seen(metrics(1), metrics(1)), "Connection refused")


@contextmanager
def serving(*answers: str):
    """A server that gives these answers, the last one for ever."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = (left.pop(0) if len(left) > 1 else left[0]).encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def top(*arguments: str, columns: str | None = "80"):
    return CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": columns})


class TestCommand:
    def test_json(self):
        with serving(metrics(1), metrics(2)) as url:
            result = top("--url", url, "--interval", "0.1", "--json")
        document = json.loads(result.stdout)
        assert document["roots"][0]["path"] == "/nvme/kv"
        assert document["roots"][0]["read_per_second"] > 0

    def test_once(self):
        with serving(metrics(1), metrics(2)) as url:
            result = top("--url", url, "--interval", "0.1", "--once")
        assert result.exit_code == 0
        assert "/nvme/kv" in result.stdout

    def test_live_with_an_end(self):
        with serving(metrics(1), metrics(2), metrics(3)) as url:
            result = top("--url", url, "--interval", "0.1", "--count", "2")
        assert result.exit_code == 0
        assert "/nvme/kv" in result.stdout

    def test_a_server_that_goes_away_is_waited_for(self):
        with serving(metrics(1), "no metrics here") as url:
            result = top("--url", url, "--interval", "0.1", "--count", "1")
        assert result.exit_code == 0
        assert "no metrics of vLLM" in result.stdout

    def test_no_server(self):
        result = top("--url", "127.0.0.1:1")
        assert result.exit_code == 2
        assert "is the server up" in result.stderr

    def test_another_kind_of_server(self):
        with serving("<html></html>") as url, pytest.raises(ScrapeError, match="no metrics"):
            scrape(url)
