"""Processes of one host find each other, prove who they are, and pass descriptors: of memory and of processes.

They meet at a unix socket that has no place in the file system. Its name and a secret travel over the communicator
that they already have; the kernel says whose process is at the other end, and another user's is refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from typing import NamedTuple

from torchstrat.core.engine import Communicator
from torchstrat.distributed.collectives.shared_memory import lockstep
from torchstrat.distributed.collectives.shared_memory.common_memory import Segment

MEETING = "the start of shared memory (processes of one host meet)"
_LARGEST = 250  # ranks: the kernel passes at most 253 descriptors in a message
_HELLO = struct.Struct("<32sI")  # secret, rank
_PARCEL = struct.Struct("<Q")  # size of the segment
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PATIENCE_SECONDS = 20.0
_DIFFERENCES = {
    "machine": "run on several hosts",
    "network": "run in several network namespaces (containers)",
    "user": "belong to several users",
}


class NotNeighboursError(Exception):
    """These processes cannot share memory; the text says why, and is the same on all of them."""


class NoSharedMemoryError(NotNeighboursError):
    """They run in one place, and still something failed: there is no room, or a socket did not open."""


class Place(NamedTuple):
    """Where a process runs. Processes in equal places can pass each other descriptors."""

    machine: str
    network: int
    """Names of sockets without a file belong to a network namespace."""
    user: int

    @staticmethod
    def here() -> Place:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
        return Place(machine, os.stat("/proc/self/ns/net").st_ino, os.geteuid())


class Neighbours:
    """The ranks of one job on one host. ``processes``: a pidfd of each."""

    def __init__(self, communicator: Communicator) -> None:
        """Every rank calls it. Raises `NotNeighboursError` on all of them if it fails on one."""
        self._communicator = communicator
        self._listener: socket.socket | None = None  # of rank 0, until all have connected
        self._sockets: list[socket.socket] = []  # rank 0: to each of the others, in order; others: to rank 0
        self.processes: tuple[int, ...] = ()
        try:
            self._require_one_place()
            self._meet()
        except BaseException:
            self.close()
            raise

    def _require_one_place(self) -> None:
        why_not, place = lockstep.why_not(), None
        if why_not is None:
            try:
                place = Place.here()
                os.close(os.pidfd_open(os.getpid()))  # a sandbox may refuse it
            except OSError as error:
                why_not = f"the system refuses what it needs: {error}"
        everyone = self._communicator.all_gather_object((why_not, place), MEETING)
        for rank, (reason, _) in zip(self._communicator.ranks, everyone, strict=True):
            if reason is not None:
                raise NotNeighboursError(f"{reason} (replica {rank})")
        if len(everyone) > _LARGEST:
            raise NotNeighboursError(f"it is for at most {_LARGEST} processes, and there are {len(everyone)}")
        places = [place for _, place in everyone]
        for field, what in _DIFFERENCES.items():
            if len({getattr(place, field) for place in places}) > 1:
                raise NotNeighboursError(f"the processes {what}")

    def agree(self, failure: str | None) -> None:
        """Raise `NoSharedMemoryError` on every rank if one has a failure to tell."""
        failures = self._communicator.all_gather_object(failure, MEETING)
        for rank, told in zip(self._communicator.ranks, failures, strict=True):
            if told is not None:
                raise NoSharedMemoryError(f"{told} (replica {rank})")

    # -- meeting ----------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        invitation, failure = None, None
        try:
            if self._communicator.rank == 0:
                invitation = self._open_meeting()
        except OSError as error:
            failure = f"no socket could be opened: {error}"
        invitation = self._communicator.broadcast_object(invitation, 0, MEETING)
        if invitation is not None:
            try:
                self._connect(*invitation)
            except OSError as error:
                failure = f"processes of this host could not connect: {error}"
        self.agree(failure)

    def _open_meeting(self) -> tuple[str, bytes]:
        """A name in the abstract namespace, which no file stands for, and a secret."""
        name = f"\0torchstrat-{secrets.token_hex(16)}"
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(self._communicator.size)
        return name, secrets.token_bytes(32)

    def _connect(self, name: str, key: bytes) -> None:
        own = os.pidfd_open(os.getpid())
        self.processes = (own,)
        if self._listener is not None:
            with self._listener:
                self._receive_everyone(self._listener, key, own)
        else:
            self._introduce(name, key, own)

    def _receive_everyone(self, listener: socket.socket, key: bytes, own: int) -> None:
        found: dict[int, tuple[socket.socket, int]] = {}
        try:
            self._receive(listener, key, found)
        finally:
            self._sockets = [found[rank][0] for rank in sorted(found)]
            self.processes = (own, *(found[rank][1] for rank in sorted(found)))
        for connection in self._sockets:
            socket.send_fds(connection, [b"p"], list(self.processes))

    def _receive(self, listener: socket.socket, key: bytes, found: dict[int, tuple[socket.socket, int]]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while len(found) < self._communicator.size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, self._communicator.size) if rank not in found]
                raise TimeoutError(f"replicas {missing} did not connect within {_PATIENCE_SECONDS:g} s") from None
            connection.settimeout(_PATIENCE_SECONDS)
            caller = _receive_hello(connection, key)
            if caller is None or caller[0] in found:
                connection.close()
                if caller is not None:
                    os.close(caller[1])
                continue
            found[caller[0]] = connection, caller[1]

    def _introduce(self, name: str, key: bytes, own: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets = [connection]
        connection.settimeout(_PATIENCE_SECONDS)
        connection.connect(name)
        if _user_of(connection) != os.geteuid():
            raise PermissionError("another user's process answers at the socket of replica 0")
        socket.send_fds(connection, [_HELLO.pack(key, self._communicator.rank)], [own])
        _, processes, _, _ = socket.recv_fds(connection, 1, self._communicator.size)
        os.close(own)
        self.processes = tuple(processes)
        if len(processes) != self._communicator.size:
            raise ConnectionError("replica 0 hung up")

    # -- memory -----------------------------------------------------------------------------------------------------

    def share(self, size: int) -> Segment:
        """One segment that every rank maps. Every rank calls it, with the same size. Raises `NoSharedMemoryError`."""
        segment, failure = None, None
        try:
            segment = self._share(size)
        except OSError as error:
            failure = error.strerror or str(error)
        try:
            self.agree(failure)
        except BaseException:
            if segment is not None:
                segment.close()
            raise
        assert segment is not None
        return segment

    def _share(self, size: int) -> Segment:
        if self._communicator.rank == 0:
            try:
                segment = Segment.allocate(size)
            except OSError:
                for connection in self._sockets:
                    connection.sendall(_PARCEL.pack(0))
                raise
            for connection in self._sockets:
                socket.send_fds(connection, [_PARCEL.pack(size)], [segment.descriptor])
            return segment
        # Rank 0 clears what it allocates first, and there may be much of it.
        self._sockets[0].settimeout(max(_PATIENCE_SECONDS, self._communicator.timeout.total_seconds()))
        message, descriptors, _, _ = socket.recv_fds(self._sockets[0], _PARCEL.size, 1)
        if not descriptors:
            raise OSError(0, "replica 0 could not allocate shared memory")
        if _PARCEL.unpack(message)[0] != size:
            os.close(descriptors[0])
            raise OSError(0, f"{size:,} bytes of shared memory were expected")
        return Segment(descriptors[0], size)

    def close(self) -> None:
        for connection in (*self._sockets, *([self._listener] if self._listener is not None else [])):
            connection.close()
        for descriptor in self.processes:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._sockets, self.processes = [], ()

    def __del__(self) -> None:
        self.close()  # of a strategy that was dropped


def _receive_hello(connection: socket.socket, key: bytes) -> tuple[int, int] | None:
    """A caller's rank and pidfd; None if it is not one of this job, or another user's."""
    try:
        if _user_of(connection) != os.geteuid():
            return None
        message, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    except OSError:
        return None
    if len(message) == _HELLO.size and len(descriptors) == 1:
        told, rank = _HELLO.unpack(message)
        if secrets.compare_digest(told, key):
            return rank, descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
