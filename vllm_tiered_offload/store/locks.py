# SPDX-License-Identifier: Apache-2.0
"""Who is alive: flock on files, and none of it inherited.

flock belongs to the open file, so it is held exactly as long as some process
has that descriptor: it goes with a killed process, works between two stores of
one process, and (as a byte-range lock) over NFS. A forked child would inherit
the descriptor and with it keep a dead parent's locks; hence the registry, and the
gate that lets no fork come between a descriptor and its entry there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator

from vllm_tiered_offload.store.api import StoreError
from vllm_tiered_offload.store.syscalls import Syscalls, explain

LONGEST_WAIT = 10.0  # seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
_FORK_WAIT = 1.0  # seconds a fork waits for calls that are under way

_held: set[int] = set()  # descriptors that carry a lock in this process


class _ForkGate:
    """Keeps forks out of a ``with`` block, any number of which may run at once.

    Not for ever: a call that hangs on a dead disk has installed no descriptor yet, so a child
    gets none of it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """In a child: of the threads that were inside, none exists there."""
        self._changed = threading.Condition()
        self._inside = 0

    def __enter__(self) -> None:
        with self._changed:
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def shut(self) -> None:
        self._changed.acquire()
        self._changed.wait_for(lambda: self._inside == 0, _FORK_WAIT)

    def open(self) -> None:
        self._changed.release()


_gate = _ForkGate()


def _close_all_in_child() -> None:
    _gate.reset()
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(
    before=_gate.shut, after_in_parent=_gate.open, after_in_child=_close_all_in_child
)


def open_kept(open_file: Callable[[], int]) -> int:
    """A descriptor whose lock must not outlive this process in a child; for ``close``."""
    with _gate:
        fd = open_file()
        _held.add(fd)
    return fd


def close(fd: int) -> None:
    """Closes a descriptor from ``open_kept``, and lets go of its lock.

    Nothing where a fork has closed it: the number may be another file's by now.
    """
    with _gate:
        if fd not in _held:
            return
        _held.discard(fd)
        with contextlib.suppress(OSError):
            # Explicitly, so that a child made without Python's fork cannot keep it.
            fcntl.flock(fd, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(fd)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Locks without waiting. False when another holds it; OSError when locks fail."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def wait_lock(
    fd: int,
    path: str,
    timeout: float = LONGEST_WAIT,
    *,
    shared: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Locks as soon as nobody else does. Raises StoreError after ``timeout`` seconds."""
    end = clock() + timeout
    pause = _FIRST_PAUSE
    while not try_lock(fd, shared=shared):
        if clock() > end:
            raise StoreError(f"{path} was not to be had for {timeout:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def same_file(fd: int, path: str) -> bool:
    """Whether ``path`` still names the open file: a lock on an unlinked file proves nothing."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


class RootLock:
    """The one lock of a root, an exclusive flock on ``root.lock``.

    Short critical sections only: create, number, adopt, evict. Each use opens the file
    anew, so threads of one process exclude each other as processes do.
    """

    def __init__(
        self,
        path: str,
        syscalls: Syscalls,
        *,
        works: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.works = works  # False: the operator vouches that nobody else is there
        self._threads = threading.Lock()  # instead, where flock is no lock
        self._syscalls = syscalls
        self._clock = clock

    @contextlib.contextmanager
    def hold(self, timeout: float = LONGEST_WAIT) -> Iterator[int]:
        """The locked descriptor of root.lock. Raises StoreError after ``timeout`` seconds."""
        fd = self._lock(timeout) if self.works else self._open()
        try:
            with contextlib.nullcontext() if self.works else self._threads:
                yield fd
        finally:
            close(fd)

    def _lock(self, timeout: float) -> int:
        """Locks what the path names, and not what it did: of two that hold locks on different
        files, as after somebody deleted root.lock, neither excludes the other."""
        end = self._clock() + timeout
        while True:
            fd = self._open()
            try:
                wait_lock(fd, self.path, end - self._clock(), clock=self._clock)
                if same_file(fd, self.path):
                    return fd
                if self._clock() > end:
                    raise StoreError(f"{self.path} is another file whenever it is locked")
            except BaseException:
                close(fd)
                raise
            close(fd)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT
        return open_kept(lambda: self._syscalls.open(self.path, flags, 0o600))


def probe(directory: str, syscalls: Syscalls) -> str | None:
    """Whether flock excludes here: None if so, else what is wrong, in one line.

    Sees this host only; that locks reach other hosts is the operator's word.
    """
    path = f"{directory}/.lock-probe-{os.getpid()}-{time.monotonic_ns()}"
    fds = []
    try:
        fds.append(syscalls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        fds.append(syscalls.open(path, os.O_RDWR, 0o600))
        if not try_lock(fds[0]):
            return "a fresh file is already locked"
        return "two holders got one lock" if try_lock(fds[1]) else None
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return explain(error)
        raise
    finally:
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            syscalls.unlink(path)
