# SPDX-License-Identifier: Apache-2.0
"""ls, du, verify, prune and clear on real roots."""

import json
import os

import pytest
from typer.testing import CliRunner

from tests.support.store_roots import (
    CHUNK,
    PRIVATE,
    SHARED,
    damage,
    fill,
    make_root,
    open_store,
)
from vllm_tiered_offload.cli.facts import ago, duration, identity_of, model_of
from vllm_tiered_offload.cli.main import app
from vllm_tiered_offload.cli.output import human_bytes, one_line
from vllm_tiered_offload.store import Namespace
from vllm_tiered_offload.store.inspection import look_at

DESCRIBED = Namespace(
    "12" * 20,
    {
        "about": {"model": "/models/org/name-7B/"},
        "fields": {
            "kv_dtype": "fp8",
            "topology": {"tp_size": 2, "pp_size": 1, "world_size": 2},
            "cache_namespace": "blue",
        },
        "meaning": {"kv_dtype": "the dtype of the KV cache"},
    },
)


def run(*arguments: object, stdin: str | None = None, columns: str | None = "200"):
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], input=stdin, env={"COLUMNS": columns}
    )


def run_json(*arguments: object, code: int = 0):
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "kv"
    make_root(path, 40)
    return path


class TestLs:
    def test_identity_in_words(self, tmp_path):
        make_root(tmp_path, 5, DESCRIBED)
        output = run("ls", tmp_path).output
        assert "org/name-7B" in output
        assert "fp8 tp=2 cache_namespace=blue" in output
        assert DESCRIBED.fingerprint[:12] in output

    def test_all_fields(self, tmp_path):
        make_root(tmp_path, 5, DESCRIBED)
        output = run("ls", "--long", tmp_path).output
        assert DESCRIBED.fingerprint in output
        assert "the dtype of the KV cache" in output

    def test_json(self, root):
        ((only,),) = [found["namespaces"] for found in run_json("ls", root)]
        assert only["chunks"] == 40
        assert only["segments"][0]["chunk_bytes"] == CHUNK
        assert only["manifest"] == SHARED.manifest

    def test_a_manifest_of_any_shape(self, tmp_path):
        for manifest in ({}, {"fields": [], "about": 5}, {"fields": {"topology": "any"}}):
            space = type("Space", (), {"manifest": manifest})()
            assert isinstance(identity_of(space), str)
            assert model_of(space) == "?"

    def test_several_roots(self, tmp_path):
        for name in ("a", "b"):
            make_root(tmp_path / name, 3)
        assert len(run_json("ls", tmp_path / "a", tmp_path / "b")) == 2

    def test_without_segments_only_when_asked(self, root):
        with open_store(root, DESCRIBED):
            pass
        assert "1 namespace(s); 1 without segments" in run("ls", root).stdout
        assert DESCRIBED.fingerprint[:12] not in run("ls", root).stdout
        assert DESCRIBED.fingerprint[:12] in run("ls", "--long", root).stdout
        assert DESCRIBED.fingerprint[:12] not in run("du", root).stdout

    def test_a_terminal_of_80_columns(self, tmp_path):
        make_root(tmp_path, 5, DESCRIBED)
        lines = run("ls", tmp_path, columns="80").stdout.splitlines()[1:]
        assert max(map(len, lines)) <= 80
        for words in ("org/name-7B", "fp8 tp=2 cache_namespace=blue", "shared"):
            assert any(words in line for line in lines), words

    def test_a_pipe_has_a_namespace_a_line(self, tmp_path):
        make_root(tmp_path, 5, DESCRIBED)
        (line,) = (
            line
            for line in run("ls", tmp_path, columns=None).stdout.splitlines()
            if DESCRIBED.fingerprint[:12] in line
        )
        assert "org/name-7B" in line
        assert "fp8 tp=2 cache_namespace=blue" in line


class TestDu:
    def test_numbers_agree_with_the_files(self, root):
        (found,) = run_json("du", root)
        files = sum(file.stat().st_blocks * 512 for file in (root / "segments").iterdir())
        assert found["bytes"] == files
        assert found["chunks"] == 40
        assert found["segments"] == {"sealed": len(list((root / "segments").iterdir()))}
        assert found["namespaces"] == {SHARED.fingerprint: files}

    def test_in_words(self, root):
        (root / "segments" / "000040.seg").touch()
        output = run("du", root).output
        assert "of 64 MiB" in output
        assert "sealed; 1 MiB each" in output
        assert "000040.seg" in output

    def test_no_segments(self, root):
        run("clear", "--yes", root)
        (line,) = (
            line for line in run("du", root).stdout.splitlines() if line.startswith("segments")
        )
        assert line.split() == ["segments", "0"]


class TestVerify:
    def test_good(self, root):
        result = run("verify", root)
        assert result.exit_code == 0
        assert "40 chunks good" in result.stdout

    def test_damage_is_exit_code_1(self, root):
        damage(look_at(root).segments[0].path, 2 * 4096)
        (found,) = run_json("verify", root, code=1)
        assert len(found["damaged"][0]["keys"]) == 1
        assert found["repaired"] is None
        result = run("verify", root)
        assert result.exit_code == 1
        assert "--repair" in result.stdout

    def test_repair(self, root):
        bad = look_at(root).segments[0]
        damage(bad.path, 2 * 4096)
        (found,) = run_json("verify", "--repair", root, code=1)
        assert [segment["path"] for segment in found["repaired"]["removed"]] == [bad.path]
        assert not os.path.exists(bad.path)
        assert run("verify", root).exit_code == 0

    def test_beside_a_running_store(self, root):
        with open_store(root) as store:
            fill(store, range(100, 110))
            assert run("verify", root).exit_code == 0


class TestPrune:
    def test_to_a_size(self, root):
        before = look_at(root)
        run_json("prune", "--max-bytes", before.allocated_bytes // 2, root)
        after = look_at(root)
        assert 0 < after.allocated_bytes <= before.allocated_bytes // 2
        assert after.segments[0].sequence > before.segments[0].sequence

    def test_by_age(self, root):
        segments = look_at(root).segments
        os.utime(segments[0].path, (1000, 1000))
        (found,) = run_json("prune", "--older-than", "1h", root)
        assert [segment["path"] for segment in found["removed"]] == [segments[0].path]

    def test_one_namespace(self, root):
        with open_store(root, DESCRIBED) as store:
            fill(store, range(5))
        (found,) = run_json("prune", "--namespace", "1212", root)
        assert len(found["removed"]) == 1
        kept = {space.fingerprint: space.chunks for space in look_at(root).namespaces}
        assert kept[SHARED.fingerprint] == 40
        assert kept[DESCRIBED.fingerprint] == 0

    def test_orphans(self, root):
        with open_store(root, PRIVATE) as store:
            fill(store, range(5))
            (found,) = run_json("prune", "--orphans", root)
            assert found["removed"] == []
        (found,) = run_json("prune", "--orphans", root)
        assert len(found["removed"]) == 1
        assert [s.fingerprint for s in look_at(root).namespaces] == [SHARED.fingerprint]

    def test_a_dry_run_changes_nothing(self, root):
        before = sorted(os.listdir(root / "segments"))
        (found,) = run_json("prune", "--max-bytes", "0", "--dry-run", root)
        assert len(found["would_remove"]) == len(before)
        assert "would remove" in run("prune", "--max-bytes", "0", "--dry-run", root).stdout
        assert sorted(os.listdir(root / "segments")) == before

    @pytest.mark.parametrize(
        "criterion", [["--max-bytes", "0"], ["--older-than", "0s"], ["--namespace", "12"]]
    )
    def test_what_stays_and_why(self, root, criterion):
        with open_store(root, DESCRIBED) as store:
            fill(store, range(5))
            planned = run("prune", *criterion, "--dry-run", root)
            (document,) = run_json("prune", *criterion, "--dry-run", root)
            done = run("prune", *criterion, root)
        for result in (planned, done):
            assert "1 stays, 1 MiB: in use by a running engine" in result.stdout
        (busy,) = document["busy"]
        assert busy["state"] == "writing"
        assert busy["path"] not in [taken["path"] for taken in document["would_remove"]]

    def test_what_was_not_asked_for_does_not_stay(self, root):
        with open_store(root, DESCRIBED) as store:
            fill(store, range(5))
            result = run("prune", "--namespace", "abab", root)
        assert "removed" in result.stdout
        assert "stay" not in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "exactly one"),
            (["--orphans", "--max-bytes", "1GB"], "exactly one"),
            (["--older-than", "soon"], "--older-than"),
            (["--max-bytes", "1G"], "--max-bytes"),
            (["--namespace", "ffff"], "fits 0 of the 1"),
            (["--namespace", ""], "fits 1 of the 1"),
        ],
    )
    def test_bad_arguments(self, root, arguments, message):
        result = run("prune", *arguments, root)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(look_at(root).segments) > 0


class TestClear:
    def test_asks(self, root):
        refused = run("clear", root, stdin="n\n")
        assert refused.exit_code != 0
        assert look_at(root).namespaces[0].chunks == 40
        assert run("clear", root, stdin="y\n").exit_code == 0
        assert look_at(root).segments == ()

    def test_json_does_not_ask(self, root):
        result = run("clear", root, "--json")
        assert result.exit_code == 2
        assert "--yes" in json.loads(result.stdout)["error"]
        assert look_at(root).namespaces[0].chunks == 40

    def test_beside_a_running_store(self, root):
        with open_store(root) as store:
            fill(store, range(100, 103))
            result = run("clear", root, stdin="y\n")
            assert result.exit_code == 0
            assert "1 stays, 1 MiB: in use by a running engine" in result.stdout
            fill(store, range(200, 203))
        assert look_at(root).namespaces[0].chunks == 6

    def test_the_question_says_what_will_go(self, root):
        sealed = look_at(root)
        with open_store(root) as store:
            fill(store, range(100, 103))
            question = run("clear", root, stdin="n\n").stderr
        size = human_bytes(sealed.allocated_bytes)
        assert f"Remove {len(sealed.segments)} segments, {size} of cached KV" in question
        assert str(root) in question
        assert "1 stays" in question

    def test_nothing_to_remove_asks_nothing(self, tmp_path):
        with open_store(tmp_path) as store:
            fill(store, range(3))
            result = run("clear", tmp_path)
        assert result.exit_code == 0
        assert "Remove" not in result.output
        assert "removed 0 of 1 segments" in result.stdout
        assert "1 stays" in result.stdout

    def test_a_dry_run(self, root):
        (found,) = run_json("clear", "--dry-run", root)
        assert len(found["would_remove"]) == len(look_at(root).segments)


COMMANDS = {
    "ls": [],
    "du": [],
    "verify": [],
    "prune": ["--max-bytes", "0"],
    "clear": ["--yes"],
}
each_command = pytest.mark.parametrize("command", COMMANDS)


@each_command
def test_not_a_root(tmp_path, command):
    result = run(command, tmp_path, *COMMANDS[command])
    assert result.exit_code == 2
    assert "holds no store" in result.stderr


@each_command
def test_no_root_at_all(command):
    result = run(command, *COMMANDS[command])
    assert result.exit_code == 2
    assert "--root-dir" in result.stderr


@each_command
def test_roots_by_position_and_by_name(tmp_path, command):
    for name in ("a", "b"):
        make_root(tmp_path / name, 3)
    a, b = tmp_path / "a", tmp_path / "b"
    for given in ([a, b], ["--root-dir", a, "-r", b], [a, "--root-dir", b, "-r", a]):
        found = run_json(command, *COMMANDS[command], *given)
        assert [entry["root"] for entry in found] == [str(a), str(b)]


@each_command
def test_a_bad_root_keeps_nothing_from_the_good_ones(tmp_path, command):
    good, bad = tmp_path / "good", tmp_path / "bad"
    make_root(good, 3)
    for given in ([good, bad], [bad, good]):
        result = run(command, *COMMANDS[command], *given)
        assert result.exit_code == 2
        assert str(good) in result.stdout
        assert str(bad) not in result.stdout
        (line,) = result.stderr.splitlines()
        assert f"{bad} is not a directory" in line
    found = run_json(command, *COMMANDS[command], bad, good, code=2)
    assert [entry["root"] for entry in found] == [str(good), str(bad)]
    assert "is not a directory" in found[1]["error"]


def test_damage_beside_a_bad_root_is_not_done(tmp_path):
    make_root(tmp_path / "a", 3)
    damage(look_at(tmp_path / "a").segments[0].path, 2 * 4096)
    result = run("verify", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 2
    assert "damaged" in result.stdout


def test_errors_of_the_system_have_path_and_name():
    assert one_line(OSError(13, "Permission denied", "/kv")) == "/kv: EACCES: Permission denied"
    assert one_line(ValueError("as it is")) == "as it is"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("2d", 172800), ("1w", 604800)]
)
def test_durations(text, seconds):
    assert duration(text, "--older-than") == seconds


def test_ago():
    assert ago(0.0) == "-"
    assert ago(1000.0, now=1005.0) == "5 s ago"
    assert ago(1000.0, now=1000.0 + 7200) == "2 h ago"
    assert ago(2000.0, now=1000.0) == "0 s ago"
