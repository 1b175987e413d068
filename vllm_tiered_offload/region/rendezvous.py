# SPDX-License-Identifier: Apache-2.0
"""Where the processes of one engine find each other: a unix socket's name.

A socket in a directory that only this user can enter comes first. The abstract
name is a fallback: it belongs to the network namespace, where another
container of the same pod may sit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator

from vllm_tiered_offload.region.forks import PrivateFd, keep_private
from vllm_tiered_offload.region.settings import RegionError

_MAX_SOCKET_PATH = 107
_BACKLOG = 256
_CONNECT_TIMEOUT = 5.0  # seconds
_SUFFIX = ".sock"
_DEAD = (errno.ECONNREFUSED, errno.ENOENT)


class SocketsUnavailable(RegionError):
    """Neither kind of unix socket works here."""


def new_socket() -> socket.socket:
    try:
        return keep_private(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    except OSError as error:
        raise SocketsUnavailable(f"no unix sockets: {error.strerror}") from error


def base_directories() -> list[str]:
    """Where our directory may lie, best first."""
    bases = [os.environ.get("XDG_RUNTIME_DIR", "")]
    with contextlib.suppress(FileNotFoundError):
        bases.append(tempfile.gettempdir())
    return [base for base in bases if base.startswith("/")]


def open_private_directory(path: str) -> int:
    """Descriptor of a directory of mode 0700 that this user owns, made when missing.

    Raises `OSError`; EPERM when somebody else made it, or it is open to others.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a private directory of this user", path)
    return fd


def _connect(address: str) -> socket.socket | None:
    sock = new_socket()
    sock.settimeout(_CONNECT_TIMEOUT)  # EAGAIN instead of waiting when its queue is full
    try:
        sock.connect(address)
    except OSError as error:
        sock.close()
        if error.errno in _DEAD:
            return None
        raise
    return sock


class Place:
    """A name to bind and to connect to."""

    address: str
    shown: str

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Held while deciding who listens; the kernel lets go when the holder dies."""
        raise NotImplementedError

    def remove_name(self) -> None:
        """Take away the name of a listener that is gone, or is this process; `locked`."""

    def remove_leftovers(self) -> None:
        """Take away all names of listeners that are gone; `locked`."""

    def connect(self) -> socket.socket | None:
        """A connected socket, or None when nobody listens. Raises `OSError`."""
        return _connect(self.address)

    def listen(self) -> socket.socket:
        """A listening socket; raises `OSError` (EADDRINUSE: somebody else was faster)."""
        sock = new_socket()
        try:
            sock.bind(self.address)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        return sock


class DirectoryPlace(Place):
    """A socket in our private directory."""

    def __init__(self, base: str, name: str) -> None:
        directory = os.path.join(base, f"vllm-tiered-offload-{os.geteuid()}")
        self._directory_fd = open_private_directory(directory)
        self._name = name[:24] + _SUFFIX
        self.shown = os.path.join(directory, self._name)
        self.address = self.shown
        if len(os.fsencode(self.address)) > _MAX_SOCKET_PATH:
            self.address = f"/proc/self/fd/{self._directory_fd}/{self._name}"

    def __del__(self) -> None:
        fd = self.__dict__.pop("_directory_fd", -1)
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        # A descriptor of its own: flock is shared by all users of one.
        lock = PrivateFd(os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory_fd))
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            yield
        finally:
            lock.close()

    def remove_name(self) -> None:
        self._unlink(self._name)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory_fd)

    def remove_leftovers(self) -> None:
        for name in os.listdir(self._directory_fd):
            if name.endswith(_SUFFIX) and self._is_dead(name):
                self._unlink(name)

    def _is_dead(self, name: str) -> bool:
        try:
            sock = _connect(f"/proc/self/fd/{self._directory_fd}/{name}")
        except OSError:
            return False
        if sock is None:
            return True
        sock.close()
        return False


class AbstractPlace(Place):
    """An abstract name: vanishes with its listener, needs no directory."""

    def __init__(self, name: str) -> None:
        self.address = "\0vllm-tiered-offload-" + name
        self.shown = "@" + self.address[1:]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        yield  # binding is the decision: a second bind fails


def _probe(place: Place) -> None:
    """Raise `OSError` unless a socket can be bound there (some file systems refuse)."""
    probe = new_socket()
    with place.locked(), probe:
        probe.bind(place.address)
        place.remove_name()


def _places(name: str) -> Iterator[Place]:
    for base in base_directories():
        with contextlib.suppress(OSError):
            yield DirectoryPlace(base, name)
    yield AbstractPlace(name)


def find_place(name: str) -> Place:
    """The first place that works; raises `SocketsUnavailable`.

    All processes of an engine come to the same answer: it depends on the
    environment they share, not on what is there at the moment.
    """
    probe_name = f"{os.getpid():x}-{threading.get_ident():x}"
    for place, probe in zip(_places(name), _places(probe_name), strict=False):
        with contextlib.suppress(OSError):
            _probe(probe)
            return place
    raise SocketsUnavailable("no unix socket can be bound here")
