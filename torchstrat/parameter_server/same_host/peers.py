"""This process's ways to those of its cluster that run on the same host.

A way is looked for in the background as soon as a peer is known; until it is found, and where there is none, calls go
through RPC. It cannot come later: a process that listens does so from its first moment.

Two processes of one host meet at a unix socket: both prove that they know the cluster's secret, and that they see
the same memory.

The socket has no place in the file system; its name follows from the incarnation of who listens, and exists in one
network namespace only. The kernel says whose process is at the other end, and another user's is refused. The caller
writes a random number into memory, and passes its descriptor along with a sealed request; who listens writes what
follows from the number next to it, and seals the answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from torchstrat.core.errors import AuthenticationError, CommunicationError
from torchstrat.distributed.collectives.shared_memory.common_memory import Segment
from torchstrat.parameter_server.interface import Peer
from torchstrat.parameter_server.membership.control_channel import keep_out_of_children, shut_down
from torchstrat.parameter_server.same_host.channel import Channel
from torchstrat.parameter_server.same_host.connection import Callee, Caller, Process, Serve
from torchstrat.parameter_server.same_host.pool import SharedPool
from torchstrat.parameter_server.transport.requests import Envelopes, pack_result, result_of

SECONDS = 5.0
"""How long each end waits for the other: they do nothing else in between."""

_METHOD = ".same_host"
_NUMBER_BYTES = 32
_PROOF_BYTES = 4096
_LONGEST = 16 << 10
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def name_of(peer: Peer) -> str:
    """Where a process listens, in the abstract namespace of unix sockets."""
    return f"\0torchstrat-ps-{peer.incarnation}"


def greet(peer: Peer, envelopes: Envelopes) -> tuple[socket.socket, int]:
    """A connection to ``peer``, and its process's number here.

    Raises OSError where there is nobody of that name on this host, and `CommunicationError` if it is not that process,
    another user's, or sees other memory.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(SECONDS)
        connection.connect(name_of(peer))
        pid = _process_of_same_user(connection)
        proof = Segment.allocate(_PROOF_BYTES)
        try:
            number = secrets.token_bytes(_NUMBER_BYTES)
            proof.mapping[:_NUMBER_BYTES] = number
            counter, sealed = envelopes.request(peer, _METHOD, pack_result(None))
            socket.send_fds(connection, [sealed], [proof.descriptor])
            answer = envelopes.answer_in(envelopes.unseal(connection.recv(_LONGEST), []), peer, counter, _METHOD)
            result_of(answer)
            if proof.mapping[_NUMBER_BYTES : 2 * _NUMBER_BYTES] != _reply_to(number):
                raise CommunicationError(f"{peer} does not see the memory of this process.")
        finally:
            proof.close()
        connection.settimeout(None)
        return connection, pid
    except BaseException:
        connection.close()
        raise


def be_greeted(connection: socket.socket, envelopes: Envelopes) -> Peer:
    """Who has connected. Raises OSError and `CommunicationError`; the caller closes the connection then."""
    connection.settimeout(SECONDS)
    _process_of_same_user(connection)
    sealed, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        request = envelopes.request_in(envelopes.unseal(sealed, []))
        if request is None or request.method != _METHOD or len(descriptors) != 1:
            raise AuthenticationError("a process that connected from this host does not know the cluster's secret.")
        proof = Segment(os.dup(descriptors[0]), os.fstat(descriptors[0]).st_size)
        try:
            number = proof.mapping[:_NUMBER_BYTES]
            proof.mapping[_NUMBER_BYTES : 2 * _NUMBER_BYTES] = _reply_to(number)
        finally:
            proof.close()
        connection.send(envelopes.reply(request, pack_result(None)))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    connection.settimeout(None)
    return request.sender


def _reply_to(number: bytes) -> bytes:
    return hashlib.sha256(number).digest()


def _process_of_same_user(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise CommunicationError("the process at the other end of a unix socket belongs to another user.")
    return int(pid)


SWITCH = "TORCHSTRAT_SAME_HOST"
"""An environment variable: ``off`` for a process that is to use RPC alone."""

_BACKLOG = 128


def why_not() -> str | None:
    """Why this process cannot talk to others of its host through memory; None if it can."""
    if os.environ.get(SWITCH, "").lower() == "off":
        return f"{SWITCH}=off"
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"it needs Linux, and this is {sys.platform}"
    return None


class Neighbours:
    """Thread-safe.

    Args:
        peer: this process.
        serve: answers requests, on the thread of the connection that they came by.
        on_sign: called at every sign of life, with the incarnation of who gave it.
        on_gone: called, on a thread of the connection, when a process that can be called has hung up: it has ended.
    """

    def __init__(
        self,
        peer: Peer,
        envelopes: Envelopes,
        serve: Serve,
        *,
        on_sign: Callable[[str], None],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self.pool = SharedPool()
        self._peer, self._envelopes, self._serve = peer, envelopes, serve
        self._on_sign, self._on_gone = on_sign, on_gone
        self._changed = threading.Condition()
        self._callers: dict[str, Caller | str | None] = {}  # or why not; None: it is being found out
        self._callees: set[Callee] = set()
        self._closed = False
        self._wake_at = math.inf
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep_out_of_children(self._listening)
        self._listening.bind(name_of(peer))
        self._listening.listen(_BACKLOG)
        threading.Thread(target=self._listen, name="torchstrat-same-host", daemon=True).start()
        threading.Thread(target=self._watch_time, name="torchstrat-deadlines", daemon=True).start()

    # -- calling ----------------------------------------------------------------------------------------------------

    def add(self, peer: Peer) -> None:
        """Look for a way to this peer."""
        with self._changed:
            if self._closed or peer.incarnation in self._callers:
                return
            self._callers[peer.incarnation] = None
        threading.Thread(target=self._connect, args=(peer,), name=f"torchstrat-to-{peer.task}", daemon=True).start()

    def remove(self, peer: Peer) -> None:
        with self._changed:
            caller = self._callers.get(peer.incarnation)
            self._callers[peer.incarnation] = "it was removed"
            self._changed.notify_all()
        if isinstance(caller, Caller):
            caller.hang_up()

    def caller(self, incarnation: str) -> Caller | None:
        """The way to a peer, if it was found by now."""
        found = self._callers.get(incarnation)
        return found if isinstance(found, Caller) else None

    def wait_for_way(self, peer: Peer) -> str | None:
        """None if there is one, else why not. Waits until that is known; see `SECONDS`."""
        with self._changed:
            self._changed.wait_for(lambda: self._callers.get(peer.incarnation, "") is not None, 2 * SECONDS)
            found = self._callers.get(peer.incarnation)
        if isinstance(found, Caller):
            return None
        return found or "it is not known yet"

    def will_wait(self, seconds: float) -> None:
        """Somebody waits for an answer so long."""
        due = time.monotonic() + seconds
        if due < self._wake_at:
            with self._changed:
                self._wake_at = min(due, self._wake_at)
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            ways: list[Caller | Callee] = [each for each in self._callers.values() if isinstance(each, Caller)]
            ways += self._callees
            self._changed.notify_all()
        shut_down(self._listening)
        self._listening.close()
        for way in ways:
            way.hang_up()
        self.pool.close()

    def _connect(self, peer: Peer) -> None:
        try:
            connection, pid = greet(peer, self._envelopes)
        except (OSError, CommunicationError) as error:
            self._found(peer, str(error))
            return
        channel = Channel(connection, self.pool)
        gone, sign = self._on_gone, self._on_sign
        caller = Caller(
            channel, self.pool, peer, Process(pid), on_broken=lambda: gone(peer), on_sign=lambda: sign(peer.incarnation)
        )
        self._found(peer, caller)

    def _found(self, peer: Peer, found: Caller | str) -> None:
        with self._changed:
            is_wanted = self._callers.get(peer.incarnation) is None and not self._closed
            if is_wanted:
                self._callers[peer.incarnation] = found
                self._changed.notify_all()
        if not is_wanted and isinstance(found, Caller):
            found.hang_up()

    def _watch_time(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._wake_at - time.monotonic()) > 0:
                    self._changed.wait(None if left == math.inf else left)
                if self._closed:
                    return
                callers = [each for each in self._callers.values() if isinstance(each, Caller)]
                self._wake_at = math.inf
            soonest = min((caller.expire(time.monotonic()) for caller in callers), default=math.inf)
            with self._changed:
                self._wake_at = min(self._wake_at, soonest)

    # -- answering --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of descriptors: those that are there go on
                continue
            threading.Thread(target=self._greeted, args=(connection,), name="torchstrat-greeting", daemon=True).start()

    def _greeted(self, connection: socket.socket) -> None:
        try:
            sender = be_greeted(connection, self._envelopes)
        except (OSError, CommunicationError):
            connection.close()
            return
        callee: Callee
        sign = self._on_sign

        def end() -> None:
            with self._changed:
                self._callees.discard(callee)

        callee = Callee(Channel(connection), sender, self._serve, on_sign=lambda: sign(sender.incarnation), on_end=end)
        with self._changed:
            if not self._closed:
                self._callees.add(callee)
                callee.start()
                return
        with contextlib.suppress(OSError):
            connection.close()
