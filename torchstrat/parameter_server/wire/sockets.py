"""This process's TCP sockets that the C++ side of RPC holds, and that its interface says nothing about."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator


class Listener:
    """The socket on which an agent listens, found among this process's file descriptors.

    An agent takes the end of a connection that has not said hello for an error of its listener, and closes that for
    good. A stranger can do it, and so can a peer that is killed in the fraction of a millisecond before its hello.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self._descriptor, self._identity = -1, (0, 0)
        for descriptor, candidate in _sockets():
            with contextlib.suppress(OSError):
                listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and candidate.getsockname() == address:
                    self._descriptor, self._identity = descriptor, _identity(descriptor)

    @property
    def is_open(self) -> bool:
        """Also True where it could not be found: then nothing is known."""
        if self._descriptor < 0:
            return True
        try:
            return _identity(self._descriptor) == self._identity
        except OSError:
            return False

    def duplicate(self) -> socket.socket | None:
        """The same socket by another descriptor: it listens as long as one of the two is open. None if not found."""
        return socket.socket(fileno=os.dup(self._descriptor)) if self._descriptor >= 0 else None


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def shut_down_connections(url: str) -> None:
    """End every connection that this process has made to this address. The reads on them then fail, which makes RPC
    close and free them; it offers no other way to hang up."""
    address = address_of(url)
    for _, connection in _sockets():
        with contextlib.suppress(OSError):  # not connected
            if connection.getpeername() == address:
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's internet sockets, with their file descriptors; each is a duplicate, closed when the next comes."""
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    for descriptor in map(int, os.listdir(folder)):
        with contextlib.suppress(OSError):  # closed in between
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    if duplicate.family == socket.AF_INET:
                        yield descriptor, duplicate


def address_of(url: str) -> tuple[str, int]:
    """Of ``uv://127.0.0.1:40123``."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    return host.strip("[]"), int(port)
