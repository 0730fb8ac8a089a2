"""Control connections: framed, authenticated messages of plain data between two processes of a cluster.

A connection is plain TCP, begun with a handshake (see `handshake`). Everything after it is a frame:
length, HMAC, JSON. Each direction has a key of its own, made from the secret and fresh random bytes of both
sides, and the HMAC covers the frame's number, which is not sent. So a frame that was changed, repeated, left out,
reordered, or recorded on another connection ends the connection. Nothing is encrypted, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torchstrat.core.errors import (
    AuthenticationError,
    ClusterConfigError,
    CommunicationError,
    CommunicationTimeoutError,
    InvalidArgumentError,
    PeerUnavailableError,
)
from torchstrat.parameter_server.interface import Task
from torchstrat.parameter_server.membership.cluster_checks import split_address

MAXIMAL_FRAME_BYTES = 16 << 20
CONNECT_SECONDS = 2.0
FRAME_SECONDS = 10.0
"""For the rest of a frame whose first byte has come, and for sending one."""

SILENCE_SECONDS = 30
"""After which a connection is given up. Longer than any process may be silent, counted from the last byte, which may
have come `_IDLE_SECONDS` before the silence began: whether it lives is what heartbeats tell, and not this."""

_IDLE_SECONDS, _PROBE_SECONDS = 6, 3
_MAC_BYTES = 32
_FRAME = struct.Struct(f"!I{_MAC_BYTES}s")
_NUMBERED = struct.Struct("!QI")


@dataclass(frozen=True)
class FrameKeys:
    """Of one connection: for what this side sends, and for what the other does."""

    sending: bytes
    receiving: bytes


class ControlChannel:
    """One authenticated connection; made by `torchstrat.parameter_server.membership.handshake.shake_hands`.

    Any thread may `send` and `hang_up`; one thread receives, and closes it when it is done.

    Args:
        sock: Connected, with the handshake done; owned from now on.
        keys: Of this connection.
        name: How error messages call the other side.
    """

    def __init__(self, sock: socket.socket, keys: FrameKeys, name: str) -> None:
        self.name = name
        self._sock = sock
        self._keys = keys
        self._sent = 0
        self._received = 0
        self._sending = threading.Lock()
        keep_out_of_children(sock)
        sock.settimeout(FRAME_SECONDS)

    def send(self, message: Mapping[str, object]) -> None:
        """Send one message of plain data (what JSON holds).

        Raises:
            PeerUnavailableError: the connection is closed.
            CommunicationTimeoutError: the other side has stopped reading.
            InvalidArgumentError: the message is larger than `MAXIMAL_FRAME_BYTES`.
        """
        payload = json.dumps(message, separators=(",", ":")).encode()
        if len(payload) > MAXIMAL_FRAME_BYTES:
            raise InvalidArgumentError(
                f"a message of {len(payload)} bytes to {self.name} is larger than {MAXIMAL_FRAME_BYTES} bytes allow."
            )
        with self._sending, failures_named(self.name):
            mac = _frame_mac(self._keys.sending, self._sent, payload)
            self._sent += 1
            self._sock.sendall(_FRAME.pack(len(payload), mac) + payload)

    def receive(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """The next message; waits for it for ``timeout_seconds`` (None: until the connection ends).

        Raises:
            PeerUnavailableError: the connection was closed, by either side.
            CommunicationTimeoutError: nothing came, or a frame stopped half-way.
            AuthenticationError: a frame was changed, repeated or left out. The connection is of no more use.
        """
        with failures_named(self.name):
            _wait_readable(self._sock, deadline_after(timeout_seconds))
            deadline = deadline_after(FRAME_SECONDS)
            length, mac = _FRAME.unpack(read_exactly(self._sock, _FRAME.size, deadline))
            if length > MAXIMAL_FRAME_BYTES:
                raise AuthenticationError(
                    f"{self.name} announced a message of {length} bytes; no process of ours does."
                )
            payload = read_exactly(self._sock, length, deadline)
        if not hmac.compare_digest(mac, _frame_mac(self._keys.receiving, self._received, payload)):
            raise AuthenticationError(
                f"a control message from {self.name} was changed, repeated or left out on its way; the connection ends."
            )
        self._received += 1
        message: dict[str, object] = json.loads(payload)
        return message

    def hang_up(self) -> None:
        """End the connection from any thread: whoever receives on it, here or there, gets `PeerUnavailableError`."""
        shut_down(self._sock)

    def close(self) -> None:
        """End the connection and give its descriptor back; for the thread that receives, when it is done."""
        self.hang_up()
        self._sock.close()


def connect(address: str, whose: Task | str, timeout_seconds: float = CONNECT_SECONDS) -> socket.socket:
    """A connection to ``address``, nothing said yet.

    Raises:
        PeerUnavailableError: nobody listens there, or the host is unknown or out of reach.
    """
    host, port = split_address(address, whose)
    try:
        sock = socket.create_connection((host, port), timeout_seconds)
    except OSError as error:
        reason = "nothing listens there" if isinstance(error, ConnectionRefusedError) else error.strerror or error
        raise PeerUnavailableError(f"{whose} at {address}: {reason}.") from None
    keep_out_of_children(sock)
    if sock.getsockname() == sock.getpeername():
        # TCP lets a socket connect to itself when the port that the system picks for it is the one that it dials. Then
        # it would keep the task that it waits for from listening; aborted rather than closed, so that no TIME_WAIT is
        # left on the port either.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        raise PeerUnavailableError(f"{whose} at {address}: nothing listens there.")
    return sock


def local_host_towards(host: str, port: int) -> str:
    """The address of this machine's interface that leads to ``host``; nothing is sent.

    Raises:
        ClusterConfigError: the host is unknown or out of reach.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ClusterConfigError(f"there is no way from this machine to {host!r}: {error.strerror or error}.") from None


def shut_down(sock: socket.socket) -> None:
    """Wake whoever reads ``sock``, in this process or the other; its descriptor is closed by who owns it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _frame_mac(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _NUMBERED.pack(number, len(payload)) + payload, hashlib.sha256)


def deadline_after(seconds: float | None) -> float:
    """On the clock of `time.monotonic`; None is never."""
    return float("inf") if seconds is None else time.monotonic() + seconds


def read_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly ``count`` bytes. TimeoutError past the deadline, however slowly they trickle in; EOFError at the end."""
    parts: list[bytes] = []
    while count:
        _wait_readable(sock, deadline)
        part = sock.recv(min(count, 1 << 16))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _wait_readable(sock: socket.socket, deadline: float) -> None:
    # Not the socket's own timeout: another thread may be sending under it.
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(None if left == float("inf") else left * 1000):
        raise TimeoutError


@contextlib.contextmanager
def failures_named(other: str) -> Iterator[None]:
    """What a socket raises, as errors that say who was on the other side."""
    try:
        yield
    except TimeoutError:
        raise CommunicationTimeoutError(f"{other} did not answer on its control connection in time.") from None
    except (OSError, EOFError, ValueError) as error:  # ValueError: the socket is closed on this side
        detail = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise PeerUnavailableError(f"the control connection to {other} is closed{detail}.") from None


def keep_alive(sock: socket.socket) -> None:
    """Notice a host that vanished without a word: some time after `SILENCE_SECONDS` the connection breaks by itself."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = (SILENCE_SECONDS - _IDLE_SECONDS) // _PROBE_SECONDS
    options = {
        "TCP_KEEPIDLE": _IDLE_SECONDS,
        "TCP_KEEPINTVL": _PROBE_SECONDS,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": 1000 * SILENCE_SECONDS,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # macOS lacks some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_closes_after_fork = False


def keep_out_of_children(sock: socket.socket) -> None:
    """Close ``sock`` in forked children of this process, such as a DataLoader's workers.

    A child that outlived this process by seconds would keep the connection open for as long, and nobody would notice
    the death; or keep the port, and the task could not be started again.
    """
    global _closes_after_fork
    _open_sockets.add(sock)
    if not _closes_after_fork:
        _closes_after_fork = True
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for sock in list(_open_sockets):
        with contextlib.suppress(OSError):
            sock.close()


Result = TypeVar("Result")
End = TypeVar("End")


@dataclass(frozen=True)
class _Event:
    """With an ``answer`` somebody waits for what the action returns or raises."""

    action: Callable[[], object]
    answer: Future[Any] | None = None


class EventThread(Generic[End]):
    """Runs actions in the order in which they come, until one says how it all ends.

    Args:
        name: Of the thread.
        on_end: Called last, on this thread, with what ended it: an ``End``, or what an action raised.
    """

    def __init__(self, name: str, on_end: Callable[[End | BaseException], None]) -> None:
        self._on_end = on_end
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()  # its put is safe in a signal handler
        self._lock = threading.Lock()
        self._over = False
        self._alarm: tuple[float, Callable[[], End]] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin with what has come so far."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, in pieces: a signal just before an endless wait would not be seen until the next one."""
        while self._thread.is_alive():
            self._thread.join(0.2)

    def tell(self, action: Callable[[], End | None]) -> None:
        """Have ``action`` run; what it returns, unless None, or raises ends the thread. Past the end: nothing.

        Safe in a signal handler.
        """
        self._events.put(_Event(action))

    def ask(self, question: Callable[[], Result]) -> Result:
        """Have ``question`` run, and wait; what it returns or raises.

        Raises:
            CommunicationError: the thread has ended, or ends before it comes to it.
        """
        answer: Future[Result] = Future()
        with self._lock:
            if self._over:
                raise CommunicationError(f"{self._thread.name} is about to end.")
            self._events.put(_Event(question, answer))
        return answer.result()

    def set_alarm(self, seconds: float | None, action: Callable[[], End]) -> None:
        """End with what ``action`` returns, after that time, unless the alarm is set again; None: never.

        For actions of this thread.
        """
        self._alarm = None if seconds is None else (time.monotonic() + seconds, action)

    def refuse_questions(self) -> None:
        """Answer those that wait, and those that come, with `CommunicationError`."""
        with self._lock:
            self._over = True
        while not self._events.empty():
            answer = self._events.get().answer
            if answer is not None:
                answer.set_exception(CommunicationError(f"{self._thread.name} is about to end."))

    def _run(self) -> None:
        outcome: End | BaseException
        try:
            outcome = self._until_the_end()
        except BaseException as error:
            outcome = error
        self.refuse_questions()
        self._on_end(outcome)

    def _until_the_end(self) -> End:
        while True:
            try:
                event = self._events.get(timeout=self._patience())
            except queue.Empty:
                assert self._alarm is not None
                return self._alarm[1]()
            end: End | None = _happen(event)
            if end is not None:
                return end

    def _patience(self) -> float | None:
        return None if self._alarm is None else max(0.0, self._alarm[0] - time.monotonic())


def _happen(event: _Event) -> Any:
    if event.answer is None:
        return event.action()
    try:
        event.answer.set_result(event.action())
    except BaseException as error:  # also SystemExit, which ends this thread: who asked would wait without end
        event.answer.set_exception(error)
        if not isinstance(error, Exception):
            raise
    return None
