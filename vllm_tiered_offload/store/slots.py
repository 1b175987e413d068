# SPDX-License-Identifier: Apache-2.0
"""Taking and freeing slots: where the bound is kept.

A file is made only under the root lock, only below slot N, only by O_EXCL, and is locked
and given its header before the root lock goes. So N files are never exceeded, and a file
with a header and without a lock has no living writer.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_tiered_offload.store import faults, locks
from vllm_tiered_offload.store import format as fmt
from vllm_tiered_offload.store.api import Namespace, StoreError
from vllm_tiered_offload.store.direct_io import BlockIO, page_aligned
from vllm_tiered_offload.store.geometry import segment_bytes_needed
from vllm_tiered_offload.store.root import Root, slot_number
from vllm_tiered_offload.store.syscalls import EXHAUSTED, NO_SPACE, Syscalls, errno_name


class NoRoomError(Exception):
    """No slot is free, or the file system has no room; says which."""


class Removal(enum.Enum):
    """How an attempt to free a slot ended."""

    DONE = "done"
    BUSY = "busy"  # a live process writes it, another frees it, or no descriptor is left
    REFUSED = "refused"  # EPERM, EBUSY and the like: it will not go
    CHANGED = "changed"  # the path names another file by now, or none


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A fresh file: open, locked, with its header in place."""

    path: str
    fd: int
    header: fmt.PageBlock


class Slots:
    """The files under ``segments/``."""

    def __init__(self, root: Root, syscalls: Syscalls, io: BlockIO) -> None:
        self._root = root
        self._syscalls = syscalls
        self._io = io
        self._sparse = False  # the file system does not preallocate
        self._sequences = threading.Lock()
        self._highest_sequence = 0  # of all segments seen; a lost root.lock starts above it
        self.in_the_making: set[int] = set()  # sequences of files that no writer knows yet
        self.removed: deque[int] = deque(maxlen=1024)  # ... of files that go, or should have

    def list(self) -> dict[int, str]:
        """Slots in use, by number. Raises OSError when the directory cannot be read."""
        found: dict[int, str] = {}
        with os.scandir(self._root.segments_dir) as entries:
            for entry in entries:
                number = slot_number(entry.name)
                if number is not None:
                    found[number] = entry.path
        return found

    def lacking_space(self, segments: int = 1) -> int:
        """How many segments would have to go for the file system to keep min_free_bytes with
        so many more; 0 or less if none."""
        if not self._root.min_free_bytes:
            return 0
        # Without preallocation the open segments have not taken their space yet.
        segments += self._sparse * segments
        size = self._root.geometry.segment_bytes
        wanted = segments * size + self._root.min_free_bytes
        return -((self._syscalls.free_bytes(self._root.path) - wanted) // size)

    def create(self, namespace: Namespace, chunk_bytes: int) -> NewSegment:
        """Takes a slot. Raises NoRoomError, or OSError for what is not about room."""
        with self._root.lock.hold() as lock_fd:
            self._require_room_for(chunk_bytes)
            if self.lacking_space() > 0:
                raise NoRoomError("min_free_bytes")
            for slot in self._free_slots():
                try:
                    sequence = self._next_sequence(lock_fd)
                    return self._create(slot, sequence, namespace, chunk_bytes)
                except FileExistsError:
                    continue  # another host's file that the listing did not show yet
                except OSError as error:
                    if error.errno in NO_SPACE:
                        raise NoRoomError(errno_name(error)) from error
                    raise
        raise NoRoomError("all slots are in use")

    def _require_room_for(self, chunk_bytes: int) -> None:
        """Another process may have settled the geometry of an empty root anew."""
        geometry = self._root.geometry
        if geometry.segment_bytes < segment_bytes_needed(chunk_bytes, 1, geometry.page_bytes):
            raise StoreError(
                f"segments of {geometry.segment_bytes} bytes, as another process has chosen, "
                f"cannot hold a chunk of {chunk_bytes} bytes"
            )

    def _free_slots(self) -> Iterator[int]:
        used = self.list()
        limit = self._root.slots
        if len(used) < limit:  # those above the limit take room, too, until they are gone
            yield from (slot for slot in range(limit) if slot not in used)
        for slot, path in used.items():
            if slot < limit and self.remove_leftover(path):
                yield slot

    def _create(
        self, slot: int, sequence: int, namespace: Namespace, chunk_bytes: int
    ) -> NewSegment:
        path = self._root.slot_path(slot)
        geometry = self._root.geometry
        header = fmt.PageBlock(
            magic=fmt.SEGMENT_MAGIC,
            page_bytes=geometry.page_bytes,
            segment_bytes=geometry.segment_bytes,
            sequence=sequence,
            offset=0,
            chunk_bytes=chunk_bytes,
            slot=slot,
            private=namespace.private,
            at=time.time_ns(),
            length=os.getpid(),
            fingerprint=namespace.fingerprint,
        )
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        fd = locks.open_kept(lambda: self._io.open(path, flags))
        self.in_the_making.add(sequence)
        try:
            self._prepare(fd, header)
        except BaseException:
            self.in_the_making.discard(sequence)
            with contextlib.suppress(OSError):
                self._syscalls.ftruncate(fd, 0)
            with contextlib.suppress(OSError):
                self._syscalls.unlink(path)
            locks.close(fd)
            raise
        return NewSegment(path, fd, header)

    def _prepare(self, fd: int, header: fmt.PageBlock) -> None:
        faults.point("slots.created")
        os.fchmod(fd, 0o600)
        if self._root.lock.works and not locks.try_lock(fd):
            raise OSError(errno.EBUSY, "a new file is already locked")
        faults.point("slots.locked")
        try:
            self._syscalls.fallocate(fd, header.segment_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            self._sparse = True
            self._syscalls.ftruncate(fd, header.segment_bytes)
        page = page_aligned(header.page_bytes)
        page[:] = header.pack()
        self._io.write(fd, [page], 0)
        faults.point("slots.header_written")

    def _next_sequence(self, lock_fd: int) -> int:
        """One more than any before: root.lock remembers it, or, once it was lost, the files."""
        text = os.pread(lock_fd, 32, 0).strip()
        if text.isdigit():
            self.note_sequence(int(text))
        else:
            self._look_at_all_sequences()
        sequence = self._highest_sequence + 1
        os.pwrite(lock_fd, b"%020d\n" % sequence, 0)
        self.note_sequence(sequence)
        return sequence

    def _look_at_all_sequences(self) -> None:
        for path in self.list().values():
            with contextlib.suppress(OSError):
                fd = self._syscalls.open(path, os.O_RDONLY)
                try:
                    self.note_sequence(self._sequence_of(fd))
                finally:
                    os.close(fd)

    def note_sequence(self, sequence: int) -> None:
        """A segment with this number exists."""
        with self._sequences:
            self._highest_sequence = max(self._highest_sequence, sequence)

    def remove_leftover(self, path: str) -> bool:
        """Frees a slot whose file is empty, left by a crash between truncate and unlink.

        Call under the root lock.
        """
        try:
            if self._syscalls.stat(path).st_size != 0:
                return False
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return self.remove(path, 0) is Removal.DONE

    def remove(self, path: str, sequence: int) -> Removal:
        """Frees the slot of the segment with this sequence (0: of an empty or unreadable file).

        Call under the root lock: between a file's creation and its lock nobody else may look.
        """
        claim = self.claim(path, sequence)
        if isinstance(claim, Removal):
            return claim
        return self.finish(path, claim)

    def claim(self, path: str, sequence: int) -> int | Removal:
        """First half of ``remove``: the locked descriptor of a file that may go.

        Call under the root lock; ``finish`` needs it no more, as the file stays locked.
        """
        try:
            fd = locks.open_kept(lambda: self._syscalls.open(path, os.O_RDWR))
        except FileNotFoundError:
            return Removal.CHANGED
        except OSError as error:
            return Removal.BUSY if error.errno in EXHAUSTED else Removal.REFUSED
        verdict = Removal.BUSY
        try:
            if not self._root.lock.works or locks.try_lock(fd):
                same = locks.same_file(fd, path) and self._sequence_of(fd) == sequence
                if same:
                    return fd
                verdict = Removal.CHANGED
        except OSError:
            verdict = Removal.REFUSED
        locks.close(fd)
        return verdict

    def finish(self, path: str, fd: int) -> Removal:
        """Second half of ``remove``: gives the space back, then the name.

        Truncating comes first: a plain unlink frees nothing while a reader has the file open.
        """
        try:
            faults.point("slots.before_truncate")
            self._syscalls.ftruncate(fd, 0)
            faults.point("slots.before_unlink")
            if locks.same_file(fd, path):  # a person's rm may have made room for another file
                self._syscalls.unlink(path)
        except FileNotFoundError:
            return Removal.DONE
        except OSError:
            return Removal.REFUSED
        finally:
            locks.close(fd)
        return Removal.DONE

    def _sequence_of(self, fd: int) -> int:
        page = os.pread(fd, fmt.MIN_PAGE_BYTES, 0)
        try:
            return fmt.unpack_page_block(page, fmt.SEGMENT_MAGIC).sequence
        except fmt.NewerFormatError:
            return -1  # matches nothing: another version's file is never removed
        except fmt.FormatError:
            return 0
