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
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import asdict, dataclass, fields
from enum import Enum

from torchstrat.errors import AuthenticationError, VersionMismatchError
from torchstrat.parameter_server.meeting.control import (
    ControlChannel,
    FrameKeys,
    deadline_after,
    failures_named,
    keep_alive,
    keep_out_of_children,
    read_exactly,
)
from torchstrat.parameter_server.meeting.versions import Versions
from torchstrat.parameter_server.tasks import Task

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

    Args:
        sock: A connected stream socket that nothing was said on.
        side: Who connected.
        key: Derived from the cluster's secret for the purpose ``control``.
        me: This process.
        other: Whom error messages are about, such as ``worker 3 at 10.0.0.7:2222``.
        timeout_seconds: For all of it.

    Returns:
        The connection, and who is on its other side.

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
