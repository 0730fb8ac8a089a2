"""The port where a process waits for others of its cluster, and for anybody else who finds it.

Whoever connects has a few seconds to prove that it belongs here, in a thread of its own, so that nobody is held up by a
connection that says nothing, or says it slowly. Connections that wait for that are bounded; the oldest makes room for
the newest, since an honest handshake takes milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Callable

from torchstrat.errors import ClusterConfigError, TorchstratError
from torchstrat.parameter_server.meeting.cluster_checks import join_address, split_address
from torchstrat.parameter_server.meeting.control import ControlChannel, keep_out_of_children, shut_down
from torchstrat.parameter_server.meeting.handshake import HANDSHAKE_SECONDS, Introduction, Side, shake_hands
from torchstrat.parameter_server.tasks import Task

MAXIMAL_STRANGERS = 64
BIND_SECONDS = 1.0
"""A port can be in use for a moment: somebody who dials it may be given it as the port of its own end."""

OUT_OF_DESCRIPTORS_SECONDS = 0.1


class ControlListener:
    """Listens from `start` to `close`.

    Args:
        address: ``host:port``: exactly this host is bound. Port 0 takes a free one; see `address`.
        key: Derived from the cluster's secret for the purpose ``control``.
        me: This process.
        on_channel: Called with each connection that has proved itself and who it is, in a thread that is then its own
            for as long as the call takes. It closes the connection.
        on_refused: Called with why a connection came to nothing: `AuthenticationError` and `VersionMismatchError`, and
            what a health check or a port scan looks like, `PeerUnavailableError` and `CommunicationTimeoutError`.
        handshake_seconds: For each connection to prove itself.

    Raises:
        ClusterConfigError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        me: Introduction,
        *,
        on_channel: Callable[[ControlChannel, Task], None],
        on_refused: Callable[[TorchstratError], None],
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._key, self._me = key, me
        self._on_channel, self._on_refused = on_channel, on_refused
        self._handshake_seconds = handshake_seconds
        self._listening = _bound(address, me.task)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for sock in (self._listening, self._wake_receiver, self._wake_sender):
            keep_out_of_children(sock)
        host, port = self._listening.getsockname()[:2]
        self.address = join_address(host, port)
        self._lock = threading.Lock()
        self._closed = False
        self._strangers: dict[socket.socket, None] = {}  # an ordered set
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name=f"control port of {me.task}", daemon=True)

    def start(self) -> None:
        """Accept from now on."""
        self._listening.listen(128)
        self._acceptor.start()

    def close(self, *, wait: bool = True) -> None:
        """Accept nobody any more, and drop those who have not proved themselves. May be called twice.

        Args:
            wait: For the calls of ``on_channel`` to return, except for the one it is called from. Their connections
                must have been hung up.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            strangers = list(self._strangers)
        for sock in strangers:
            shut_down(sock)
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"!")
        if self._acceptor.ident is not None:
            self._acceptor.join()
        for thread in list(self._threads) if wait else ():
            if thread is not threading.current_thread():
                thread.join()
        if first:
            for sock in (self._listening, self._wake_receiver, self._wake_sender):
                sock.close()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        poll.register(self._wake_receiver, select.POLLIN)
        self._listening.setblocking(False)
        while True:
            poll.poll()
            if self._closed:
                return
            try:
                sock, (host, port, *_) = self._listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(OUT_OF_DESCRIPTORS_SECONDS)
                continue  # otherwise the connection was gone before it was accepted
            self._admit(sock, join_address(host, port))

    def _admit(self, sock: socket.socket, address: str) -> None:
        thread = threading.Thread(target=self._serve, args=(sock, address), name="control connection", daemon=True)
        with self._lock:
            if self._closed:
                sock.close()
                return
            if len(self._strangers) >= MAXIMAL_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]  # its thread may take a while to notice
                shut_down(oldest)
            self._strangers[sock] = None
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads for us; whoever it was will dial again
            with self._lock:
                self._strangers.pop(sock)
                self._threads.discard(thread)
            sock.close()

    def _serve(self, sock: socket.socket, address: str) -> None:
        try:
            other = f"the process at {address}"
            channel, task = shake_hands(
                sock, Side.LISTENER, self._key, self._me, other=other, timeout_seconds=self._handshake_seconds
            )
        except TorchstratError as error:
            self._on_refused(error)
        else:
            self._no_stranger(sock)
            self._on_channel(channel, task)
        finally:
            self._no_stranger(sock)
            sock.close()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _no_stranger(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)


def _bound(address: str, task: Task) -> socket.socket:
    host, port = split_address(address, task)
    until = time.monotonic() + BIND_SECONDS
    while True:
        try:
            return _bind(host, port)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            if in_use and time.monotonic() < until:
                time.sleep(BIND_SECONDS / 20)
                continue
            reason = "another process uses that port" if in_use else error.strerror or error
            remedy = (
                "End that process, or give the task another port everywhere in the cluster's description."
                if in_use
                else "The host must be a name or an address of this machine."
            )
            raise ClusterConfigError(f"{task} cannot listen on {address}: {reason}. {remedy}") from None


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    sock = socket.socket(family, kind, protocol)
    try:
        # A task that is started again binds the port while connections of its predecessor are in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except OSError:
        sock.close()
        raise
    return sock
