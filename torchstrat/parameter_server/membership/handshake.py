"""How two processes prove to each other that they belong to one cluster, before anything else is said.

The two sides of a connection are the *dialer*, who connected, and the *listener*::

    both      opening        magic, protocol version, 32 fresh random bytes (the nonce)
    dialer    claim, proof   the name it goes by; HMAC(key, "dialer", version, both nonces, claim)
    listener  verdict, proof one byte; HMAC(key, "listener", version, both nonces, claim)
    both      introduction   the first frame: which task this is, and its versions

The dialer proves itself first, so a stranger who connects gets nothing but random bytes; one who listens gets a proof
that no honest process accepts. For a proof is good for one pair of nonces, half of which the verifier has just drawn,
and for one side: neither a recorded nor a reflected one is of use. Whoever relays between two honest processes can read
and cut the connection, and not say anything: the keys of its frames come from the secret too.

What a coordinator and a task say to each other on a fresh control connection, and afterwards::

    coordinator → task    coordinator   its Peer
    task → coordinator    task          its Peer, and the status of its service; or: refused
    coordinator → task    welcome       it can be called by the task from now on; or: refused, fenced
    task → coordinator    ready         it has told its service, and can be called; or: refused

Neither is told of the other before the other can be called, and no call of a new coordinator reaches a service that has
not heard of it. Then the connection stays open. ``goodbye`` from either side is an orderly end, ``fenced`` tells a task
that its process was given up, ``ping`` is answered by ``pong``; a connection that ends without a word is a death.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

import torch

from torchstrat.core import __version__
from torchstrat.core.errors import (
    AuthenticationError,
    ClusterConfigError,
    CommunicationError,
    FencedError,
    TorchstratError,
    VersionMismatchError,
)
from torchstrat.distributed.cluster import host_and_port
from torchstrat.parameter_server.interface import Peer, Task
from torchstrat.parameter_server.membership.cluster_checks import split_address
from torchstrat.parameter_server.membership.control_channel import (
    ControlChannel,
    FrameKeys,
    deadline_after,
    failures_named,
    keep_alive,
    keep_out_of_children,
    read_exactly,
    shut_down,
)


@dataclass(frozen=True)
class Versions:
    """Of torchstrat, whose messages travel; of torch, whose transport and tensors do; of Python, whose code objects do.

    Only what matters is kept: torch's release without its build (a worker with CUDA and a server without work
    together), and of Python ``major.minor``, within which code objects are compatible.
    """

    torchstrat: str
    torch: str
    python: str

    def __str__(self) -> str:
        return f"torchstrat {self.torchstrat}, torch {self.torch}, Python {self.python}"


def local_versions() -> Versions:
    """This process's."""
    return Versions(
        torchstrat=__version__,
        torch=str(torch.__version__).partition("+")[0],
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
    )


PROTOCOL = 1
HANDSHAKE_SECONDS = 5.0

_MAGIC = b"torchstrat control"
_NONCE_BYTES = _MAC_BYTES = _CLAIM_BYTES = 32
_OPENING = struct.Struct(f"!{len(_MAGIC)}sH{_NONCE_BYTES}s")
_ACCEPTED, _REFUSED = b"\x01", b"\x00"


class Side(Enum):
    """Which end of a connection this is. Part of every proof."""

    DIALER = b"dialer"
    LISTENER = b"listener"


@dataclass(frozen=True)
class Introduction:
    """Who a process is, told to the other side once both have proved that they know the secret."""

    task: Task
    versions: Versions


def shake_hands(
    sock: socket.socket,
    side: Side,
    key: bytes,
    me: Introduction,
    *,
    other: str,
    timeout_seconds: float = HANDSHAKE_SECONDS,
) -> tuple[ControlChannel, Task]:
    """Prove, be proved to, and introduce each other. The socket stays the caller's to close when this raises.

    ``sock``: a connected stream socket that nothing was said on; ``key``: derived from the cluster's secret for the
    purpose ``control``; ``other``: whom error messages are about, such as ``worker 3 at 10.0.0.7:2222``;
    ``timeout_seconds``: for all of it. Returns the connection, and who is on its other side.

    Raises:
        AuthenticationError: the other side does not know the secret, or is no torchstrat process.
        VersionMismatchError: it runs other versions.
        CommunicationTimeoutError, PeerUnavailableError: it stopped answering, or hung up.
    """
    deadline = deadline_after(timeout_seconds)
    keep_out_of_children(sock)
    sock.settimeout(timeout_seconds)
    with failures_named(other):
        nonces = _exchange_openings(sock, side, other, deadline)
        if side is Side.DIALER:
            _prove_as_dialer(sock, key, nonces, me, other, deadline)
        else:
            _prove_as_listener(sock, key, nonces, other, deadline)
        keep_alive(sock)
    channel = ControlChannel(sock, _frame_keys(key, side, nonces), other)
    return channel, _introduced(channel, me, deadline)


def _exchange_openings(sock: socket.socket, side: Side, other: str, deadline: float) -> bytes:
    """Both nonces, the dialer's first."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_OPENING.pack(_MAGIC, PROTOCOL, nonce))
    magic, protocol, their_nonce = _OPENING.unpack(read_exactly(sock, _OPENING.size, deadline))
    if magic != _MAGIC:
        raise AuthenticationError(f"{other} does not speak torchstrat's control protocol; is the address right?")
    if protocol != PROTOCOL:
        raise VersionMismatchError(
            f"{other} speaks version {protocol} of torchstrat's control protocol, this process version {PROTOCOL}; "
            "install one version of torchstrat everywhere."
        )
    return bytes(nonce + their_nonce if side is Side.DIALER else their_nonce + nonce)


def _prove_as_dialer(
    sock: socket.socket, key: bytes, nonces: bytes, me: Introduction, other: str, deadline: float
) -> None:
    claim = str(me.task).encode()[:_CLAIM_BYTES].ljust(_CLAIM_BYTES, b"\0")
    sock.sendall(claim + _proof(key, Side.DIALER, nonces, claim))
    verdict = read_exactly(sock, 1, deadline)
    if verdict == _ACCEPTED:
        proof = read_exactly(sock, _MAC_BYTES, deadline)
        if hmac.compare_digest(proof, _proof(key, Side.LISTENER, nonces, claim)):
            return
    raise AuthenticationError(
        f"{other} does not know this cluster's secret, or this process, {me.task}, does not: they were started with "
        "different ones. Give every process of the cluster the same TORCHSTRAT_SECRET."
    )


def _prove_as_listener(sock: socket.socket, key: bytes, nonces: bytes, other: str, deadline: float) -> None:
    claim, proof = read_exactly(sock, _CLAIM_BYTES, deadline), read_exactly(sock, _MAC_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, Side.DIALER, nonces, claim)):
        sock.sendall(_REFUSED)
        name = claim.rstrip(b"\0").decode("ascii", "replace")
        calls_itself = f", which calls itself {name}," if name.replace(" ", "").isalnum() else ""
        raise AuthenticationError(
            f"{other}{calls_itself} does not know this cluster's secret; it was refused. If it belongs to the cluster, "
            "start it with the same TORCHSTRAT_SECRET."
        )
    sock.sendall(_ACCEPTED + _proof(key, Side.LISTENER, nonces, claim))


def _introduced(channel: ControlChannel, me: Introduction, deadline: float) -> Task:
    # Both speak before they listen, so that both know why when they do not get along.
    channel.send({"task": [me.task.job, me.task.index], "versions": asdict(me.versions)})
    message = channel.receive(max(0.0, deadline - time.monotonic()))
    job, index = message["task"]
    task = Task(str(job), int(index))
    versions = Versions(*(str(message["versions"].get(field.name)) for field in fields(Versions)))
    if versions != me.versions:
        raise VersionMismatchError(
            f"the processes of one cluster must run the same versions: {task} ({channel.name}) runs {versions}; "
            f"{me.task} (this process) runs {me.versions}."
        )
    return task


def _proof(key: bytes, side: Side, nonces: bytes, claim: bytes) -> bytes:
    text = b"|".join((b"torchstrat proof", side.value, str(PROTOCOL).encode(), nonces + claim))
    return hmac.digest(key, text, hashlib.sha256)


def _frame_keys(key: bytes, side: Side, nonces: bytes) -> FrameKeys:
    dialer, listener = (
        hmac.digest(key, b"|".join((b"torchstrat frames", speaker.value, nonces)), hashlib.sha256)
        for speaker in (Side.DIALER, Side.LISTENER)
    )
    return FrameKeys(dialer, listener) if side is Side.DIALER else FrameKeys(listener, dialer)


GREETING_SECONDS = 10.0
"""For each answer while greeting. The other side may be asking its present coordinator whether it is alive."""

MESSAGE_GOODBYE, MESSAGE_FENCED, MESSAGE_PING, MESSAGE_PONG = "goodbye", "fenced", "ping", "pong"

BUSY, REMOVED, MISTAKEN, FAILED = "busy", "removed", "mistaken", "failed"
"""Why a connection is refused: by another process's leave only; because the task was taken out of the cluster; because
the two do not fit, so that trying again is no use; because the service raised."""


class RefusedError(CommunicationError):
    """The other side is of this cluster and does not want this process. ``why``: one of the kinds above."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True)
class Greeted:
    """A task as it introduced itself."""

    peer: Peer
    status: Mapping[str, object]


def peer_to_plain(peer: Peer) -> dict[str, object]:
    """As a control message carries it."""
    return {
        "job": peer.task.job,
        "index": peer.task.index,
        "incarnation": peer.incarnation,
        "url": peer.url,
        "host": peer.host,
        "pid": peer.pid,
    }


def peer_from_plain(plain: Mapping[str, Any]) -> Peer:
    """The inverse of `peer_to_plain`."""
    task = Task(str(plain["job"]), int(plain["index"]))
    return Peer(task, str(plain["incarnation"]), str(plain["url"]), str(plain["host"]), int(plain["pid"]))


def greet_task(
    channel: ControlChannel,
    coordinator: Peer,
    *,
    given_up: Callable[[Peer], str | None],
    add_peer: Callable[[Peer], None] | None,
) -> Greeted:
    """The coordinator's side. ``given_up`` says why a process was; ``add_peer`` makes the task callable here.

    Raises:
        RefusedError: the task does not want this coordinator now.
        FencedError: the task's process was given up; it has been told.
        CommunicationError: the connection broke, or the task does not answer.
    """
    channel.send({"type": "coordinator", "peer": peer_to_plain(coordinator)})
    answer = _expect(channel, "task")
    peer = peer_from_plain(answer["peer"])
    reason = given_up(peer)
    if reason is not None:
        channel.send({"type": MESSAGE_FENCED, "reason": reason})
        raise FencedError(f"{peer} was given up ({reason}); it has been told to start again.")
    if add_peer is not None:
        add_peer(peer)
    channel.send({"type": "welcome"})
    _expect(channel, "ready")
    return Greeted(peer, answer["status"])


def hear_coordinator(channel: ControlChannel) -> Peer:
    """The task's side, first half: who wants to be its coordinator."""
    return peer_from_plain(_expect(channel, "coordinator")["peer"])


def answer_coordinator(channel: ControlChannel, me: Peer, status: Mapping[str, object]) -> None:
    """The task's side, second half; then the service is told, and `say_ready`.

    Raises:
        FencedError: this process was given up.
        RefusedError: the coordinator does not want this task.
    """
    channel.send({"type": "task", "peer": peer_to_plain(me), "status": dict(status)})
    _expect(channel, "welcome")


def say_ready(channel: ControlChannel) -> None:
    """The service knows its coordinator."""
    channel.send({"type": "ready"})


def say_goodbye(channel: ControlChannel, reason: str) -> None:
    """An orderly end: of the coordinator, which has finished, or of the task, which leaves."""
    channel.send({"type": MESSAGE_GOODBYE, "reason": reason})


def refuse(channel: ControlChannel, why: str, message: str) -> None:
    """Tell the other side why it is not wanted."""
    channel.send({"type": "refused", "why": why, "message": message})


def _expect(channel: ControlChannel, kind: str) -> dict[str, Any]:
    message = channel.receive(GREETING_SECONDS)
    if message["type"] == kind:
        return message
    if message["type"] == MESSAGE_FENCED:
        raise FencedError(message["reason"])
    if message["type"] == MESSAGE_GOODBYE:
        raise RefusedError(f"{channel.name} says good-bye: {message['reason']}", BUSY)
    if message["type"] == "refused":
        raise RefusedError(f"{channel.name} refuses: {message['message']}", message["why"])
    raise CommunicationError(f"{channel.name} said {message['type']!r} where {kind!r} was expected.")


MAXIMAL_STRANGERS = 64
BIND_SECONDS = 1.0
"""A port can be in use for a moment: somebody who dials it may be given it as the port of its own end."""

OUT_OF_DESCRIPTORS_SECONDS = 0.1


class ControlListener:
    """Listens from `start` to `close`. Anybody may turn up: whoever connects has ``handshake_seconds`` to prove that it
    belongs here, in a thread of its own. Connections that wait for that are bounded; the oldest makes room for the
    newest, since an honest handshake takes milliseconds.

    Args:
        address: ``host:port``: exactly this host is bound. Port 0 takes a free one; see `address`.
        key: Derived from the cluster's secret for the purpose ``control``.
        on_channel: Called with each connection that has proved itself and who it is, in a thread that is then its own
            for as long as the call takes. It closes the connection.
        on_refused: Called with why a connection came to nothing: `AuthenticationError` and `VersionMismatchError`, and
            what a health check or a port scan looks like, `PeerUnavailableError` and `CommunicationTimeoutError`.

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
        self.address = host_and_port(host, port)
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
            self._admit(sock, host_and_port(host, port))

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
