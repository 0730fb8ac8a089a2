"""A socket that carries messages, and beside them the descriptors of memory that the other side has not seen yet."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Iterable
from typing import NamedTuple

from torchstrat.parameter_server.meeting.control import keep_out_of_children, shut_down
from torchstrat.parameter_server.same_host.message import LARGEST_BYTES, Message, decode, encode
from torchstrat.parameter_server.same_host.pool import SharedPool

_BUFFER_BYTES = 1 << 20
_MOST_DESCRIPTORS = 64
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)


class TooLongError(Exception):
    """A message does not fit into the socket's buffer, or names too much new memory at once. Nothing was sent."""


class Received(NamedTuple):
    """``segments``: (number, descriptor) of what the message is the first to refer to; ``dropped``: of what none will
    refer to any more."""

    message: Message
    segments: list[tuple[int, int]]
    dropped: tuple[int, ...]


class Channel:
    """One end. Anybody may send; one thread receives."""

    def __init__(self, sock: socket.socket, pool: SharedPool | None = None) -> None:
        """``pool``: the memory that messages of this end refer to; None: they refer to the other end's."""
        self._socket = sock
        self._pool = pool
        self._known: set[int] = set()  # segments that the other end has
        self._dropped = 0  # how many of those that the pool has dropped it has been told of
        self._sending = threading.Lock()
        self._buffer = memoryview(bytearray(LARGEST_BYTES))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        keep_out_of_children(sock)

    def send(self, message: Message, segments: Iterable[int] = ()) -> None:
        """``segments``: those that the message refers to. Raises `TooLongError`, and OSError once it is broken."""
        with self._sending:
            new = tuple({number for number in segments if number not in self._known})
            dropped = () if self._pool is None else tuple(self._pool.dropped_since(self._dropped))
            content = encode(message, new, tuple(number for number in dropped if number in self._known))
            if len(content) > LARGEST_BYTES or len(new) > _MOST_DESCRIPTORS:
                raise TooLongError(f"{len(content):,} bytes with {len(new)} descriptors")
            if new:
                assert self._pool is not None
                socket.send_fds(self._socket, [content], [self._pool.segment(number).descriptor for number in new])
                self._known.update(new)
            else:
                self._socket.send(content)
            self._known.difference_update(dropped)
            self._dropped += len(dropped)

    @property
    def has_news(self) -> bool:
        """Whether the next message will say that segments were dropped."""
        return self._pool is not None and self._pool.has_dropped(self._dropped)

    def receive(self) -> Received | None:
        """The next message; None at the end."""
        try:
            size, ancillary, flags, _ = self._socket.recvmsg_into(
                [self._buffer], _DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return None
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if not size or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            # The end; or this process has no room for more descriptors, and cannot understand what follows.
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        message, new, dropped = decode(self._buffer[:size])
        return Received(message, list(zip(new, descriptors, strict=True)), dropped)

    def hang_up(self) -> None:
        """Let both ends find that it is over; who receives closes."""
        shut_down(self._socket)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
