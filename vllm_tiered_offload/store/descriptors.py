# SPDX-License-Identifier: Apache-2.0
"""Read descriptors of segments: few, reused, and each of the right file."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import overload

from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.direct_io import BlockIO, page_aligned
from vllm_tiered_offload.store.segment import Segment
from vllm_tiered_offload.store.syscalls import EXHAUSTED

MOST_OPEN = 256


class GoneError(OSError):
    """The slot holds another segment by now, or none: somebody evicted it."""


class Descriptors:
    """At most ``most`` beside those in use; the least recently used is closed first."""

    def __init__(self, io: BlockIO, most: int = MOST_OPEN) -> None:
        self._io = io
        self._most = most
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, int] = OrderedDict()  # ordinal -> fd
        self._used: dict[int, tuple[int, int]] = {}  # ordinal -> (fd, users)

    @contextlib.contextmanager
    def use(self, segment: Segment) -> Iterator[int]:
        """A descriptor of exactly this segment. Raises GoneError, or OSError."""
        fd = self._take(segment.ordinal, None)
        if fd is None:
            fresh = self._open(segment)
            fd = self._take(segment.ordinal, fresh)
            if fd != fresh:  # another thread was quicker
                os.close(fresh)
        try:
            yield fd
        finally:
            self._give_back(segment)

    def forget(self, segment: Segment) -> None:
        """Closes it as soon as nobody uses it: an open descriptor keeps a file's space."""
        with self._lock:
            fd = self._idle.pop(segment.ordinal, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Closes those that nobody uses."""
        with self._lock:
            idle = list(self._idle.values())
            self._idle.clear()
        for fd in idle:
            os.close(fd)

    def _open_file(self, path: str) -> int:
        try:
            return self._io.open(path, os.O_RDONLY)
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
        self.close()  # what is only kept for later must not be what is missing now
        return self._io.open(path, os.O_RDONLY)

    def _open(self, segment: Segment) -> int:
        try:
            fd = self._open_file(segment.path)
        except FileNotFoundError as error:
            raise GoneError(error.errno, error.strerror, segment.path) from error
        try:
            page = page_aligned(segment.header.page_bytes)
            count = self._io.read(fd, [page], 0)
            found = fmt.unpack_page_block(page[:count], fmt.SEGMENT_MAGIC)
            if found.sequence == segment.sequence:
                return fd
        except fmt.FormatError:
            pass
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        raise GoneError(errno.ESTALE, f"not segment {segment.sequence} any more", segment.path)

    @overload
    def _take(self, ordinal: int, fresh: None) -> int | None: ...

    @overload
    def _take(self, ordinal: int, fresh: int) -> int: ...

    def _take(self, ordinal: int, fresh: int | None) -> int | None:
        """The descriptor there is, used by one more; else ``fresh`` becomes it."""
        with self._lock:
            if ordinal in self._used:
                fd, users = self._used[ordinal]
            else:
                known = self._idle.pop(ordinal, fresh)
                if known is None:
                    return None
                fd, users = known, 0
            self._used[ordinal] = (fd, users + 1)
            return fd

    def _give_back(self, segment: Segment) -> None:
        close: list[int] = []
        with self._lock:
            fd, users = self._used[segment.ordinal]
            if users > 1:
                self._used[segment.ordinal] = (fd, users - 1)
                return
            del self._used[segment.ordinal]
            if segment.gone:
                close.append(fd)
            else:
                self._idle[segment.ordinal] = fd
                if len(self._idle) > self._most:
                    close.append(self._idle.popitem(last=False)[1])
        for extra in close:
            os.close(extra)
