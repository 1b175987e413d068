# SPDX-License-Identifier: Apache-2.0
"""bench on a small scale: it measures, tells, and leaves nothing behind."""

import json
import stat

import pytest
from typer.testing import CliRunner

from vllm_tiered_offload.cli import bench as bench_module
from vllm_tiered_offload.cli.benching.measure import BenchError, Measure, measure_store
from vllm_tiered_offload.cli.main import app
from vllm_tiered_offload.store import ChunkStore, StoreError

SMALL = ("--total", "8MiB", "--rounds", "1")


def bench(root, *arguments: str, env: dict | None = None):
    return CliRunner().invoke(
        app, ["bench", "--root-dir", str(root), *SMALL, *arguments], env=env
    )


def fake_fio(directory, body: str):
    """A program called fio; the environment that finds it first."""
    program = directory / "fio"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


FIO_REPORT = {
    "jobs": [
        {
            "write": {"io_bytes": 2_000_000_000, "runtime": 1000},
            "read": {"io_bytes": 4_000_000_000, "runtime": 1000},
            "usr_cpu": 5.0,
            "sys_cpu": 15.0,
            "job_runtime": 1000,
        }
    ]
}


def test_both_directions_and_nothing_left(tmp_path):
    result = bench(tmp_path, "--no-fio", "--chunk", "64KiB", "--chunk", "1MiB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(m["direction"], m["chunk_bytes"]) for m in found] == [
        ("store", 65536),
        ("load", 65536),
        ("store", 1 << 20),
        ("load", 1 << 20),
    ]
    assert all(m["gb_per_second"] > 0 and m["cpu_per_gb"] > 0 for m in found)
    assert list(tmp_path.iterdir()) == []


def test_fio_beside_it(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "disk").mkdir()
    calls = tmp_path / "calls"
    report = json.dumps(FIO_REPORT)
    env = fake_fio(tmp_path / "bin", f"echo \"$@\" >> {calls}\necho 'note'\necho '{report}'")
    result = bench(tmp_path / "disk", "--chunk", "1MiB", env=env)
    assert result.exit_code == 0, result.output
    assert "2.00" in result.stdout
    assert "4.00" in result.stdout
    assert "of fio" in result.stdout
    first, second = calls.read_text().splitlines()
    assert "--rw=write" in first
    assert "--rw=read" in second
    assert "--bs=1048576" in first
    assert "--size=8388608" in first


def test_fio_that_fails(tmp_path):
    (tmp_path / "bin").mkdir()
    env = fake_fio(tmp_path / "bin", "echo 'first' >&2; echo 'engine not found' >&2; exit 1")
    result = bench(tmp_path, "--chunk", "1MiB", env=env)
    assert result.exit_code == 2
    assert "engine not found" in result.stderr


def test_without_fio_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "has_fio", lambda: False)
    result = bench(tmp_path, "--chunk", "1MiB")
    assert result.exit_code == 0
    assert "fio is not installed" in result.stderr
    assert "of fio" not in result.stdout


def test_rows_are_never_in_two_jobs(tmp_path, monkeypatch):
    """More bytes than the memory holds: rows are used again only once they are free."""
    monkeypatch.setattr("vllm_tiered_offload.cli.benching.measure._MEMORY", 2 << 20)
    monkeypatch.setattr("vllm_tiered_offload.cli.benching.measure._JOB", 1 << 20)
    busy: dict[int, set[int]] = {}
    submit, take = ChunkStore.submit_store, ChunkStore.take_completions

    def checked_submit(self, job, keys, rows):
        assert not set(rows) & set().union(*busy.values())
        busy[job] = set(rows)
        submit(self, job, keys, rows)

    def checked_take(self):
        done = take(self)
        for completion in done:
            busy.pop(completion.job_id, None)
        return done

    monkeypatch.setattr(ChunkStore, "submit_store", checked_submit)
    monkeypatch.setattr(ChunkStore, "take_completions", checked_take)
    measures = list(measure_store(tmp_path / "root", 64 << 10, 16 << 20))
    assert [m.direction for m in measures] == ["store", "load"]


def test_chunks_that_were_dropped_are_an_error(tmp_path, monkeypatch):
    real = ChunkStore.stats

    def stats(self):
        from dataclasses import replace

        return replace(real(self), dropped_chunks={"queue": 3})

    monkeypatch.setattr(ChunkStore, "stats", stats)
    with pytest.raises(BenchError, match="3 chunks were not stored"):
        list(measure_store(tmp_path / "root", 64 << 10, 1 << 20))


def test_medians():
    def measure(rate):
        return Measure("store", "load", 4096, rate, rate / 10, True)

    (median,) = bench_module._medians([measure(3.0), measure(1.0), measure(2.0)])
    assert (median.gb_per_second, median.cpu_per_gb) == (2.0, 0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunk", "1KiB"], "4KiB"),
        (["--chunk", "16MiB"], "below one chunk"),
        (["--total", "1EiB"], "smaller --total"),
        (["--chunk", "lots"], "--chunk"),
        (["--direct-io", "maybe", "--chunk", "1MiB", "--no-fio"], "direct_io"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    result = bench(tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path):
    result = bench(tmp_path / "no")
    assert result.exit_code == 2
    assert "is not a directory" in result.stderr


def test_direct_io_that_must_be_and_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "vllm_tiered_offload.store.direct_io.refusal", lambda *_: "the disk refuses"
    )
    with pytest.raises(StoreError, match="refuses"):
        list(measure_store(tmp_path / "root", 65536, 1 << 20, direct_io="on"))


class TestPlot:
    def test_without_matplotlib_nothing_is_measured(self, tmp_path, monkeypatch):
        import builtins

        real = builtins.__import__

        def no_matplotlib(name, *arguments, **keywords):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *arguments, **keywords)

        monkeypatch.setattr(builtins, "__import__", no_matplotlib)
        result = bench(tmp_path, "--plot", str(tmp_path / "x.png"))
        assert result.exit_code == 2
        assert "vllm-tiered-offload[plot]" in result.stderr

    def test_a_chart(self, tmp_path):
        pytest.importorskip("matplotlib")
        disk = tmp_path / "disk"
        disk.mkdir()
        chart = tmp_path / "chart.png"
        result = bench(disk, "--no-fio", "--chunk", "1MiB", "--plot", str(chart))
        assert result.exit_code == 0, result.output
        assert chart.read_bytes().startswith(b"\x89PNG")


def test_the_directory_by_position_and_only_one(tmp_path):
    small = (*SMALL, "--no-fio", "--chunk", "64KiB", "--json")
    result = CliRunner().invoke(app, ["bench", str(tmp_path), *small])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)
    result = CliRunner().invoke(app, ["bench", str(tmp_path), "-r", "/another", *small])
    assert result.exit_code == 2
    assert "one directory" in result.stderr
    result = CliRunner().invoke(app, ["bench", *small])
    assert result.exit_code == 2
    assert "--root-dir" in result.stderr
