"""Two processes of one host meet at a unix socket: both prove that they know the cluster's secret, and that they see
the same memory.

The socket has no place in the file system; its name follows from the incarnation of who listens, and exists in one
network namespace only. The kernel says whose process is at the other end, and another user's is refused. The caller
writes a random number into memory, and passes its descriptor along with a sealed request; who listens writes what
follows from the number next to it, and seals the answer.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct

from torchstrat.collectives.shared_memory.segment import Segment
from torchstrat.errors import AuthenticationError, CommunicationError
from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.wire.answers import pack_result, result_of
from torchstrat.parameter_server.wire.envelopes import Envelopes

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
