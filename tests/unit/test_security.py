# SPDX-License-Identifier: Apache-2.0
"""KV is prompt text in another form: who can read it, and what a root may contain.

A root is a directory that others may have prepared: links, FIFOs and devices in the place
of files must neither be followed, nor opened, nor make a start hang.
"""

from __future__ import annotations

import ast
import json
import mmap
import multiprocessing
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vllm_tiered_offload
from vllm_tiered_offload.fs_tier.fingerprint import IdentityError, fingerprint
from vllm_tiered_offload.fs_tier.identity import Layout, resolve_namespace
from vllm_tiered_offload.fs_tier.manifest import check_stored_manifests
from vllm_tiered_offload.store import ChunkStore, Namespace, StoreError, StoreSettings

MIB = 1 << 20
CHUNK = 64 << 10
KEY = b"\1" * 32 + b"\0\0\0\0"
HANG_SECONDS = 15.0


def namespace(name: str = "prod") -> Namespace:
    layout = Layout(
        tokens_per_hash=16, blocks_per_chunk=1, chunk_bytes=CHUNK, groups=(), model_name=name
    )
    return resolve_namespace(None, layout, cache_namespace=name).namespace


def settings(root: Path) -> StoreSettings:
    return StoreSettings(root_dirs=(root,), max_bytes=16 * MIB, segment_bytes=MIB)


class Opened:
    """A store with one chunk's row, closed at the end of the block."""

    def __init__(self, root: Path, of: Namespace | None = None) -> None:
        self._memory = mmap.mmap(-1, 2 * CHUNK)
        self.view = memoryview(self._memory)
        self.view[:CHUNK] = os.urandom(CHUNK)
        self.store = ChunkStore(settings(root), of or namespace(), self.view, CHUNK)

    def __enter__(self) -> Opened:
        return self

    def put(self) -> None:
        self.store.submit_store(1, [KEY], [0])
        self.store.drain()
        assert self.store.contains(KEY)

    def __exit__(self, *_: object) -> None:
        assert self.store.shutdown()


def filled(root: Path) -> None:
    with Opened(root) as opened:
        opened.put()


@pytest.fixture
def umask_zero() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_modes_are_private_whatever_the_umask(tmp_path: Path, umask_zero: None) -> None:
    root = tmp_path / "above" / "root"
    filled(root)
    seen = 0
    for directory, inner, names in os.walk(root):
        for name in [".", *inner]:
            assert stat.S_IMODE(os.stat(f"{directory}/{name}").st_mode) == 0o700, name
        for name in names:
            assert stat.S_IMODE(os.stat(f"{directory}/{name}").st_mode) == 0o600, name
            seen += 1
    assert seen >= 4  # root.json, root.lock, a manifest, a segment


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a" * 300, ".", "..", "a\0b", "a\nb", "", "\udcff", "ü"]
)
def test_any_name_of_a_model_or_namespace_is_one_safe_file_name(
    tmp_path: Path, name: str
) -> None:
    root = tmp_path / "root"
    with Opened(root, namespace(name)) as opened:
        opened.put()
    (manifest,) = (root / "namespaces").iterdir()
    assert manifest.name == f"{namespace(name).fingerprint}.json"
    # The name itself is kept for people, as data.
    assert json.loads(manifest.read_text())["manifest"]["about"]["model"] == name
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["root"]


@pytest.mark.parametrize("digits", ["../x", "A" * 40, "0" * 31, "0" * 65, "", "0" * 39 + "\n"])
def test_a_fingerprint_is_nothing_but_hex_digits(digits: str) -> None:
    with pytest.raises(StoreError):
        Namespace(digits)


@pytest.mark.parametrize("name", ["segments", "namespaces"])
def test_linked_directories_are_refused(tmp_path: Path, name: str) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / name).symlink_to(elsewhere)
    with pytest.raises(StoreError, match="symbolic link") as refused:
        Opened(root)
    assert "\n" not in str(refused.value)
    assert not list(elsewhere.iterdir())


def replace_with_link(path: Path) -> None:
    path.rename(path.with_name("moved-away"))
    path.symlink_to(path.with_name("moved-away"))


def replace_with_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/tmp/nothing-there-at-all")


def replace_with_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_with_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_with_socket(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFSOCK | 0o600)


REPLACEMENTS = [
    replace_with_link,
    replace_with_dangling_link,
    replace_with_fifo,
    replace_with_directory,
    replace_with_socket,
]


def _open_and_report(root: Path, result: multiprocessing.Queue[str]) -> None:
    try:
        with Opened(root) as opened:
            found = opened.store.contains(KEY)
            result.put(f"opened, {'found' if found else 'not found'}")
    except (StoreError, IdentityError) as error:
        result.put(f"refused: {error}")


def open_in_child(root: Path) -> str:
    """What opening the root comes to; a hang is a failure, not a hung test."""
    context = multiprocessing.get_context("fork")
    result: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=_open_and_report, args=(root, result))
    child.start()
    try:
        return result.get(timeout=HANG_SECONDS)
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_something_else_in_the_place_of_a_segment(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    root = tmp_path / "root"
    filled(root)
    for segment in (root / "segments").glob("*.seg"):
        replace(segment)
    assert open_in_child(root) == "opened, not found"


@pytest.mark.parametrize("replace", REPLACEMENTS)
@pytest.mark.parametrize("name", ["root.json", "root.lock"])
def test_something_else_in_the_place_of_a_root_file(
    tmp_path: Path, replace: Callable[[Path], None], name: str
) -> None:
    root = tmp_path / "root"
    filled(root)
    replace(root / name)
    answer = open_in_child(root)
    assert answer.startswith(("refused: ", "opened, ")), answer
    assert "\n" not in answer


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_something_else_in_the_place_of_another_manifest(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    root = tmp_path / "root"
    filled(root)
    with Opened(root, namespace("other")):
        pass
    replace(root / "namespaces" / f"{namespace('other').fingerprint}.json")
    assert open_in_child(root) == "opened, found"


@pytest.mark.root
@pytest.mark.parametrize("name", ["segments/000000.seg", "root.json"])
def test_devices_are_not_read(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    filled(root)
    (root / name).unlink()
    try:
        os.mknod(root / name, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, without end
    except PermissionError:
        pytest.skip("device nodes cannot be made here (EPERM)")
    answer = open_in_child(root)
    assert answer == "opened, not found" or answer.startswith("refused: "), answer


@pytest.mark.root
def test_a_root_of_another_user_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    for above in tmp_path.parents[:2]:
        above.chmod(above.stat().st_mode | 0o011)
    root = tmp_path / "root"
    filled(root)

    def as_nobody(result: multiprocessing.Queue[str]) -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        _open_and_report(root, result)

    context = multiprocessing.get_context("fork")
    result: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=as_nobody, args=(result,))
    child.start()
    answer = result.get(timeout=HANG_SECONDS)
    child.join()
    assert answer.startswith("refused: ")
    assert "EACCES" in answer
    assert str(root) in answer


# --- manifests ---------------------------------------------------------------------------


def manifest_of(root: Path) -> Path:
    return root / "namespaces" / f"{namespace().fingerprint}.json"


def test_a_manifest_of_an_earlier_start_is_accepted(tmp_path: Path) -> None:
    filled(tmp_path / "root")
    check_stored_manifests([tmp_path / "root", tmp_path / "none"], namespace())


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "root")
    path = manifest_of(tmp_path / "root")
    stored = json.loads(path.read_text())
    stored["manifest"]["fields"]["chunk_bytes"] = 1
    path.write_text(json.dumps(stored))
    with pytest.raises(IdentityError, match="its fields give") as refused:
        check_stored_manifests([tmp_path / "root"], namespace())
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_manifest_filed_under_another_fingerprint_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    filled(root)
    with Opened(root, namespace("other")):
        pass
    other = root / "namespaces" / f"{namespace('other').fingerprint}.json"
    other.replace(manifest_of(root))
    with pytest.raises(IdentityError):
        check_stored_manifests([root], namespace())


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"private": false}', "\xff"])
def test_a_torn_manifest_contradicts_nothing(tmp_path: Path, text: str) -> None:
    filled(tmp_path / "root")
    manifest_of(tmp_path / "root").write_text(text, encoding="latin-1")
    check_stored_manifests([tmp_path / "root"], namespace())


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_what_is_no_file_is_no_manifest(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    filled(tmp_path / "root")
    replace(manifest_of(tmp_path / "root"))
    with pytest.raises(IdentityError, match="is not a regular file"):
        check_stored_manifests([tmp_path / "root"], namespace())


# --- the code ----------------------------------------------------------------------------

UNSAFE = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
SOURCES = sorted(Path(vllm_tiered_offload.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_nothing_that_is_read_can_run_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not UNSAFE & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in UNSAFE
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "np.load", "yaml.load"}


def test_fingerprints_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    fields = {str(number): number for number in range(100)}
    assert fingerprint(fields) == fingerprint(dict(reversed(fields.items())))
