# SPDX-License-Identifier: Apache-2.0
"""Which files are the same weights, and what it costs to tell."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from vllm_tiered_offload.spec import weights
from vllm_tiered_offload.spec.weights import WeightsError, commit_of, identify_weights

GIB = 1 << 30


def safetensors(path: Path, tensors: dict[str, int], *, seed: int = 0, sparse: bool = False):
    """A file of the given tensors (name: bytes)."""
    header, place = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            file.truncate(8 + len(text) + place)
        else:
            file.write(bytes((seed + i // 512) % 256 for i in range(place)))
    return path


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def poke(path: Path, offset: int, data: bytes = b"\xa5\x5a") -> None:
    """Overwrite in place: same size, same name."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama", "rope_theta": 1}')
    tensors = {f"layers.{i}.weight": 40000 for i in range(4)}
    safetensors(directory / "model-1.safetensors", tensors)
    safetensors(directory / "model-2.safetensors", {"head": 30000}, seed=5)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the model were large: only pages of it are read."""
    monkeypatch.setattr(weights, "FULL_BYTES", 0)


def content(model: Path) -> str:
    return identify_weights(str(model)).content


def test_a_copy_elsewhere_is_the_same(model: Path, tmp_path: Path) -> None:
    before = content(model)
    copy = tmp_path / "elsewhere" / "deep" / "copy"
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    os.utime(copy / "model-1.safetensors", (1, 1))
    assert content(copy) == before
    link = tmp_path / "link"
    link.symlink_to(copy)
    assert content(link) == before


def test_the_digest_is_pinned(model: Path) -> None:
    # Another digest for the same files makes every cache in the field a miss.
    assert content(model) == "a21b542239e3a2588712219de36dd86b897b674e"


@pytest.mark.parametrize("offset", [0, 1, 79999, 159998])
def test_small_models_count_every_byte(model: Path, offset: int) -> None:
    before = content(model)
    file = model / "model-1.safetensors"
    poke(file, data_start(file) + offset)
    assert content(model) != before


@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("place", [0, 39998], ids=["first page", "last page"])
def test_sampling_looks_at_both_ends_of_every_tensor(
    model: Path, sampling: None, tensor: int, place: int
) -> None:
    before = content(model)
    file = model / "model-1.safetensors"
    poke(file, data_start(file) + 40000 * tensor + place)
    assert content(model) != before


def test_two_trainings_of_one_architecture_differ(model: Path, sampling: None) -> None:
    before = content(model)
    safetensors(model / "model-1.safetensors", {f"layers.{i}.weight": 40000 for i in range(4)})
    assert content(model) == before
    safetensors(
        model / "model-1.safetensors", {f"layers.{i}.weight": 40000 for i in range(4)}, seed=1
    )
    assert content(model) != before


def test_more_tensors_than_samples_still_read_the_header(
    model: Path, sampling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SAMPLES", 2)
    before = identify_weights(str(model))
    assert before.content == content(model)
    file = model / "model-1.safetensors"
    text = file.read_bytes()
    file.write_bytes(text.replace(b"layers.0", b"layers.9"))
    assert content(model) != before.content


def change_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "llama", "rope_theta": 2}')


def add_code(model: Path) -> None:
    (model / "modeling_x.py").write_text("pass")


def rename(model: Path) -> None:
    (model / "model-2.safetensors").rename(model / "model-3.safetensors")


def swap(model: Path) -> None:
    one, two = model / "model-1.safetensors", model / "model-2.safetensors"
    one.rename(model / "x")
    two.rename(one)
    (model / "x").rename(two)


def add_weights(model: Path) -> None:
    (model / "adapter.bin").write_bytes(b"1")


def nest_weights(model: Path) -> None:
    (model / "encoder").mkdir()
    (model / "encoder" / "model.safetensors").write_bytes(b"")


def grow(model: Path) -> None:
    with (model / "model-2.safetensors").open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "change", [change_config, add_code, rename, swap, add_weights, nest_weights, grow]
)
def test_changes_that_count(
    model: Path, change, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampled:
        monkeypatch.setattr(weights, "FULL_BYTES", 0)
    before = content(model)
    change(model)
    assert content(model) != before


def test_changes_that_do_not_count(model: Path) -> None:
    before = content(model)
    (model / "README.md").write_text("x")
    (model / "tokenizer.json").write_text('{"x": 1}')
    (model / "tokenizer_config.json").write_text("{}")
    (model / "chat_template.json").write_text("{}")
    (model / "generation_config.json").write_text("{}")
    (model / ".git").mkdir()
    (model / ".git" / "x.bin").write_bytes(b"1")
    os.chmod(model / "config.json", 0o600)
    assert content(model) == before


def test_the_work_for_100_gb_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: calls.append(args) or pread(*args))
    for number in range(20):
        tensors = {f"layers.{number}.{i}": 5 * GIB // 50 for i in range(50)}
        safetensors(tmp_path / f"model-{number:02}.safetensors", tensors, sparse=True)
    found = identify_weights(str(tmp_path))
    assert found.total_bytes > 100 * GIB * 0.99
    assert found.read_bytes <= 128 << 20
    assert len(calls) <= weights.SAMPLES + 100


def test_many_tensors_are_bounded_too(tmp_path: Path) -> None:
    for number in range(10):
        tensors = {f"experts.{number}.{i}": 1 << 20 for i in range(5000)}
        safetensors(tmp_path / f"model-{number}.safetensors", tensors, sparse=True)
    found = identify_weights(str(tmp_path))
    assert found.files == 10
    assert found.read_bytes <= 128 << 20


def test_large_files_of_other_formats_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with path.open("wb") as file:
        file.truncate(10 * GIB)
    before = identify_weights(str(tmp_path))
    assert before.read_bytes <= 128 << 20
    poke(path, 5 * GIB)
    poke(path, 10 * GIB - 2)
    assert content(tmp_path) != before.content


@pytest.mark.parametrize(
    "header",
    [b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]", b"\x05" + b"\0" * 7 + b"{nope", b"", b"\x01"],
)
def test_broken_safetensors_count_as_plain_files(
    tmp_path: Path, sampling: None, header: bytes
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + bytes(50000))
    before = content(tmp_path)
    poke(path, len(header) + 49998)
    assert content(tmp_path) != before


def test_one_file_is_a_model_too(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    before = identify_weights(str(path)).content
    other = tmp_path / "b.gguf"
    shutil.copyfile(path, other)
    assert identify_weights(str(other)).content == before
    poke(other, 50)
    assert identify_weights(str(other)).content != before


def snapshot(tmp_path: Path, name: str, model: Path) -> Path:
    """As the Hugging Face cache lays it out: links to blobs."""
    blobs = tmp_path / "models--org--x" / "blobs"
    directory = tmp_path / "models--org--x" / "snapshots" / name
    directory.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for file in model.iterdir():
        shutil.copyfile(file, blobs / f"{name[:4]}{file.name}")
        (directory / file.name).symlink_to(f"../../blobs/{name[:4]}{file.name}")
    return directory


def test_commit_of_a_snapshot_counts(model: Path, tmp_path: Path) -> None:
    one = snapshot(tmp_path, "a" * 40, model)
    two = snapshot(tmp_path, "b" * 40, model)
    assert (commit_of(str(one)), commit_of(str(two))) == ("a" * 40, "b" * 40)
    assert identify_weights(str(one)).content == content(model)
    link = tmp_path / "link"
    link.symlink_to(one)
    assert identify_weights(str(link)).commit == "a" * 40
    poke(one / "model-1.safetensors", 3000)
    assert content(one) != content(model)


@pytest.mark.parametrize("name", ["main", "a" * 39, "A" * 40, "g" * 40])
def test_other_directories_have_no_commit(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "snapshots" / name
    directory.mkdir(parents=True)
    assert commit_of(str(directory)) is None


@pytest.mark.parametrize("name", ["nothing/here", "a\0b", "\udcff", "x" * 300])
def test_missing_model_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises((WeightsError, ValueError)) as refused:
        identify_weights(str(tmp_path / name))
    assert "\n" not in str(refused.value)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="has no file ending in"):
        identify_weights(str(tmp_path))


def test_fifo_in_the_place_of_weights_is_refused_and_never_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="not a regular file"):
        identify_weights(str(tmp_path))


def test_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(WeightsError, match="No such file"):
        identify_weights(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_refused(model: Path) -> None:
    os.chmod(model / "model-1.safetensors", 0)
    with pytest.raises(WeightsError, match="denied"):
        identify_weights(str(model))


def test_newest_change_is_reported(model: Path) -> None:
    found = identify_weights(str(model))
    assert found.changed == max(
        (model / name).stat().st_ctime
        for name in ("config.json", "model-1.safetensors", "model-2.safetensors")
    )
