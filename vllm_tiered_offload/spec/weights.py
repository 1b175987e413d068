# SPDX-License-Identifier: Apache-2.0
"""Which weights these are: a digest of the files, without reading all of them.

Up to `FULL_BYTES` every byte counts. Beyond that: names and sizes, every safetensors
header (names, dtypes, shapes, places of all tensors) and `SAMPLES` pages of content,
spread so that each tensor is looked at where there are no more tensors than samples: its
first and last page and pages between. Training moves every element of the tensors it
touches, so two fine-tunes differ in the pages read; an edit of a few rows inside one
large tensor may not, and is what a Hugging Face commit (part of the identity where the
directory is a snapshot) or the key `cache_namespace` is for.

Paths, owners and times do not count: a copy of the same files is the same weights.
Safetensors layout: 8 bytes little-endian header length, JSON header, data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

FULL_BYTES = 256 << 20
SAMPLES = 16384
PAGE = 4096
# A file that is no safetensors counts as one tensor per so many bytes.
_OPAQUE_BYTES = 32 << 20
_HEADER_LIMIT = 100 << 20  # safetensors' own limit
_READ = 8 << 20
_BATCH = 256  # pieces
_THREADS = 16
_FILES_LIMIT = 20000
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Read in full: they decide what the weights mean (configuration, remote code).
_MEANING = (".json", ".py")
_MEANING_LIMIT = 16 << 20  # of each, should somebody keep data there
_IRRELEVANT = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|merges|chat_template|"
    r"generation_config|trainer_state|all_results|.*_results|README)\.json"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class WeightsError(OSError):
    """The weights cannot be identified; one line with the path and why."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What identifies a model's weights, and what it took to find out.

    `content` (hex) and `commit` (of a Hugging Face snapshot, else None) are the identity;
    the rest is for people. `changed` is the newest ctime of any file, seconds since 1970.
    """

    content: str
    commit: str | None
    files: int
    total_bytes: int
    read_bytes: int
    seconds: float
    changed: float


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    path: str
    size: int
    changed: float
    is_weights: bool


def identify_weights(model: str, clock: Callable[[], float] = time.monotonic) -> Weights:
    """The identity of the weights in a directory, or of one file (GGUF).

    Raises:
        WeightsError: no such path, no weights in it, or a file that cannot be read.
    """
    start = clock()
    try:
        files = sorted(_list_files(model), key=lambda file: file.name)
        if not any(file.is_weights for file in files):
            raise WeightsError(
                errno.ENOENT, f"has no file ending in {', '.join(_WEIGHTS)}", model
            )
        work = list(_work(files))
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(_digest, work))
    except WeightsError:
        raise
    except OSError as error:
        raise WeightsError(error.errno, error.strerror, error.filename or model) from error
    whole = hashlib.blake2b(digest_size=20)
    whole.update(json.dumps([[file.name, file.size] for file in files]).encode())
    for digest in digests:
        whole.update(digest)
    return Weights(
        content=whole.hexdigest(),
        commit=commit_of(model),
        files=len(files),
        total_bytes=sum(file.size for file in files),
        read_bytes=sum(length for _, pieces in work for _, length in pieces),
        seconds=clock() - start,
        changed=max(file.changed for file in files),
    )


def commit_of(model: str) -> str | None:
    """The commit of a Hugging Face snapshot directory (`.../snapshots/<commit>`)."""
    above, name = os.path.split(os.path.realpath(model))
    if os.path.basename(above) == "snapshots" and _COMMIT.fullmatch(name):
        return name
    return None


def _list_files(model: str) -> Iterator[_File]:
    if os.path.isfile(model):
        yield _look_at(model, "weights" + os.path.splitext(model)[1])
        return
    if not os.path.isdir(model):
        raise WeightsError(errno.ENOENT, "is neither a file nor a directory", model)
    found = 0
    for directory, inner, names in os.walk(model):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in names:
            if not _counts(name):
                continue
            path = os.path.join(directory, name)
            yield _look_at(path, os.path.relpath(path, model))
            found += 1
            if found > _FILES_LIMIT:
                raise WeightsError(errno.E2BIG, f"has more than {_FILES_LIMIT} files", model)


def _counts(name: str) -> bool:
    if name.endswith(_WEIGHTS):
        return True
    return name.endswith(_MEANING) and not _IRRELEVANT.fullmatch(name)


def _look_at(path: str, name: str) -> _File:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise WeightsError(errno.EINVAL, "is not a regular file", path)
    return _File(name, path, found.st_size, found.st_ctime, name.endswith(_WEIGHTS))


def _work(files: Sequence[_File]) -> Iterator[tuple[_File, list[tuple[int, int]]]]:
    """What to read, in an order that only depends on the files: (offset, length) pieces."""
    weights = [file for file in files if file.is_weights]
    sampled: dict[str, list[tuple[int, int]]] = {}
    if sum(file.size for file in weights) > FULL_BYTES:
        sampled = _sample({file.name: _sections(file) for file in weights})
    for file in files:
        batch: list[tuple[int, int]] = []
        whole = file.size if file.is_weights else min(file.size, _MEANING_LIMIT)
        for offset, length in sampled.get(file.name, [(0, whole)]):
            for start in range(offset, offset + length, _READ):
                batch.append((start, min(_READ, offset + length - start)))
                if sum(size for _, size in batch) >= _READ or len(batch) >= _BATCH:
                    yield file, batch
                    batch = []
        if batch:
            yield file, batch


def _sections(file: _File) -> list[tuple[int, int]]:
    """Header and tensors of a safetensors file; equal sections of any other."""
    if file.name.endswith(".safetensors"):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return _tensors(file)
    return [
        (start, min(_OPAQUE_BYTES, file.size - start))
        for start in range(0, file.size, _OPAQUE_BYTES)
    ]


def _tensors(file: _File) -> list[tuple[int, int]]:
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 2 <= length <= min(_HEADER_LIMIT, file.size - 8):
            raise ValueError(f"header of {length} bytes")
        header = json.loads(_read(descriptor, 8, length))
    finally:
        os.close(descriptor)
    places = [
        (8 + length + int(begin), int(end) - int(begin))
        for name, tensor in header.items()
        if name != "__metadata__"
        for begin, end in [tensor["data_offsets"]]
    ]
    return [(0, 8 + length), *sorted(place for place in places if place[1] > 0)]


def _sample(sections: dict[str, list[tuple[int, int]]]) -> dict[str, list[tuple[int, int]]]:
    """Pages of each section; of the sections a digest picks where there are too many."""
    count = sum(map(len, sections.values()))
    pages = max(1, SAMPLES // max(1, count))
    chosen = [(name, place) for name, places in sections.items() for place in places]
    if count > SAMPLES:
        # By a digest: every n-th would meet the same projection in every layer.
        headers = [(name, places[0]) for name, places in sections.items() if places]
        chosen = headers + sorted(chosen, key=_shuffled)[:SAMPLES]
    picked: dict[str, set[tuple[int, int]]] = {name: set() for name in sections}
    for name, (offset, size) in chosen:
        if offset == 0 and name.endswith(".safetensors"):
            picked[name].add((offset, size))
        else:
            picked[name].update(_pages(offset, size, pages))
    return {name: sorted(pieces) for name, pieces in picked.items()}


def _shuffled(place: tuple[str, tuple[int, int]]) -> bytes:
    return hashlib.blake2b(repr(place).encode(), digest_size=8).digest()


def _pages(offset: int, size: int, pages: int) -> list[tuple[int, int]]:
    """`pages` pages from the first to the last; the middle one if it is only one."""
    if size <= PAGE * pages:
        return [(offset, size)]
    if pages == 1:
        return [(offset + (size - PAGE) // 2, PAGE)]
    return [(offset + (size - PAGE) * i // (pages - 1), PAGE) for i in range(pages)]


def _digest(work: tuple[_File, list[tuple[int, int]]]) -> bytes:
    file, pieces = work
    digest = hashlib.blake2b(file.name.encode(), digest_size=20)
    # Not blocking: a FIFO that took the file's place must not hang the engine.
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        for offset, length in pieces:
            digest.update(f"{offset} {length} ".encode())
            digest.update(_read(descriptor, offset, length))
    finally:
        os.close(descriptor)
    return digest.digest()


def _read(descriptor: int, offset: int, length: int) -> bytes:
    parts = []
    while length > 0:
        part = os.pread(descriptor, length, offset)
        if not part:
            raise OSError(errno.EIO, "ended while it was read")
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
