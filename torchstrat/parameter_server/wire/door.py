"""The address at which newcomers find this process, open for as long as the process lives.

PyTorch's agent closes its listener at the first connection that ends before its hello (`sockets.Listener`). The socket
itself is kept open here by a second descriptor, so a newcomer is never refused: the kernel queues it, a thread of this
module accepts it, and passes what it says to another agent of this process, and back. By then its hello has come, so no
end of a newcomer can close the other agent's listener.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable

from torchstrat.parameter_server.meeting.control import keep_out_of_children, shut_down
from torchstrat.parameter_server.wire.sockets import Listener

_HELLO_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 0.02
"""Until a connection that the agent is about to accept has left the queue."""

_AT_ONCE_BYTES = 1 << 18

_log = logging.getLogger(__name__)


class Door:
    """Stands behind ``listener`` until it is closed.

    Args:
        another: the address of another agent of this process that listens; called, on a thread of this object, for
            each newcomer after ``listener`` was closed.
    """

    def __init__(self, listener: Listener, another: Callable[[], tuple[str, int]]) -> None:
        self._listener, self._another = listener, another
        self._closed = threading.Event()
        self._socket = listener.duplicate()
        if self._socket is not None:
            keep_out_of_children(self._socket)
            threading.Thread(target=self._watch, name="torchstrat-door", daemon=True).start()

    def close(self) -> None:
        """Before the agent is: nobody is let in any more. Who is in stays."""
        self._closed.set()
        if self._socket is not None:
            shut_down(self._socket)

    def _watch(self) -> None:
        assert self._socket is not None
        with self._socket as door:
            somebody_is_there = select.poll()
            somebody_is_there.register(door, select.POLLIN)
            while not self._closed.is_set():
                somebody_is_there.poll()
                if self._closed.is_set():
                    return
                if self._listener.is_open:
                    self._closed.wait(_LOOK_AGAIN_SECONDS)
                    continue
                try:
                    newcomer, _ = door.accept()
                except OSError:  # out of descriptors, or it went away
                    self._closed.wait(_LOOK_AGAIN_SECONDS)
                    continue
                keep_out_of_children(newcomer)
                threading.Thread(target=self._let_in, args=(newcomer,), name="torchstrat-newcomer", daemon=True).start()

    def _let_in(self, newcomer: socket.socket) -> None:
        with newcomer:
            try:
                newcomer.settimeout(_HELLO_SECONDS)
                hello = newcomer.recv(_AT_ONCE_BYTES)
                newcomer.settimeout(None)
            except OSError:
                return
            if not hello:
                return
            try:
                inside = socket.create_connection(self._another())
            except Exception:
                _log.exception("somebody who called could not be let in")
                return
            keep_out_of_children(inside)
            with inside:
                for each in (newcomer, inside):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(
                    target=_pass_on, args=(inside, newcomer), name="torchstrat-to-newcomer", daemon=True
                )
                back.start()
                _pass_on(newcomer, inside, hello)
                back.join()


def _pass_on(source: socket.socket, to: socket.socket, first: bytes = b"") -> None:
    """Until one of them ends; then both do."""
    memory = memoryview(bytearray(_AT_ONCE_BYTES))
    with contextlib.suppress(OSError):
        to.sendall(first)
        while count := source.recv_into(memory):
            to.sendall(memory[:count])
    shut_down(source)
    shut_down(to)
