"""Requests and replies as sealed bytes: who asks what of whom, and which reply belongs to which request.

The body of a request is the sender's `Peer` (pickled once, at the start), the method's name, and the payload's pickle.
The body of a reply is an answer as `answers` writes it. A refused message is None here; its sender gets `REFUSAL`.
"""

from __future__ import annotations

import functools
import logging
import pickle
import struct
import threading
from dataclasses import dataclass

import torch

from torchstrat.errors import AuthenticationError
from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.wire.payloads import Packed
from torchstrat.parameter_server.wire.sealing import Kind, Opened, Sealer

REFUSAL = b""
"""The reply to what is not authentic. It says nothing, and is not authentic either: there is nobody to seal it for."""

SELF_TEST = pickle.dumps("unpickled without authentication")
"""A message that has to be refused; refusing it is not worth a warning."""

_LENGTHS = struct.Struct("!HH")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Received:
    """A message that is authentic, new and for this process, with the tensors beside it."""

    opened: Opened
    tensors: list[torch.Tensor]


@dataclass(frozen=True)
class Request:
    """``counter`` is the sender's, for the reply to refer to."""

    sender: Peer
    method: str
    payload: Packed
    counter: int


class Envelopes:
    """What one process, ``peer``, writes and reads. Thread-safe. Reading never raises; it refuses."""

    def __init__(self, secret: bytes, peer: Peer) -> None:
        self._peer = peer
        self._introduction = pickle.dumps(peer)
        self._sealer = Sealer(secret, peer.incarnation)
        self._lock = threading.Lock()
        self.refused = 0
        """How many messages were not authentic, not new, or not for this process."""

    def request(self, to: Peer, method: str, payload: Packed) -> tuple[int, bytes]:
        """The request's counter, and what to send beside ``payload.tensors``."""
        name = method.encode()
        lengths = _LENGTHS.pack(len(self._introduction), len(name))
        body = b"".join((lengths, self._introduction, name, payload.data))
        return self._sealer.seal(Kind.REQUEST, to.incarnation, body, attachments=len(payload.tensors))

    def reply(self, request: Request, answer: Packed) -> bytes:
        """What to send beside ``answer.tensors``."""
        _, sealed = self._sealer.seal(
            Kind.REPLY,
            request.sender.incarnation,
            answer.data,
            attachments=len(answer.tensors),
            in_reply_to=request.counter,
        )
        return sealed

    def unseal(self, data: bytes, tensors: list[torch.Tensor]) -> Received | None:
        """Whatever arrives has to pass here before anything else looks at it."""
        try:
            return Received(self._sealer.open(data, attachments=len(tensors)), tensors)
        except Exception as error:
            if data not in (REFUSAL, SELF_TEST):
                self._refuse(error)
            return None

    def request_in(self, received: Received | None) -> Request | None:
        if received is None or received.opened.kind != Kind.REQUEST:
            return None
        try:
            body = received.opened.body
            introduced, named = _LENGTHS.unpack_from(body)
            name, data = _LENGTHS.size + introduced, _LENGTHS.size + introduced + named
            sender = _peer_in(body[_LENGTHS.size : name])
            if sender.incarnation != received.opened.sender:
                raise AuthenticationError(f"{received.opened.sender} introduces itself as {sender.incarnation}.")
            payload = Packed(body[data:], received.tensors)
            return Request(sender, body[name:data].decode(), payload, received.opened.counter)
        except Exception as error:  # a program that knows the secret and is not this one
            self._refuse(error)
            return None

    def answer_in(self, received: Received | None, peer: Peer, counter: int, method: str) -> Packed:
        """The answer of ``peer`` to the request with this counter. Raises `AuthenticationError`."""
        if received is None:
            raise AuthenticationError(
                f"{peer} and {self._peer} do not trust each other ({method!r}): they have different secrets, or the "
                "process at that address is another one by now. Give all processes of the cluster the same secret."
            )
        opened = received.opened
        if (opened.kind, opened.sender, opened.in_reply_to) != (Kind.REPLY, peer.incarnation, counter):
            raise AuthenticationError(f"{peer} was asked {method!r}, and what came back answers something else.")
        return Packed(opened.body, received.tensors)

    def _refuse(self, error: Exception) -> None:
        with self._lock:
            self.refused += 1
            count = self.refused
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, …: a stranger must not fill the disk
            _log.warning("%s refused a message (%d so far): %s", self._peer, count, error)


@functools.lru_cache(maxsize=1024)
def _peer_in(introduction: bytes) -> Peer:
    """Only ever called with what was authenticated."""
    peer = pickle.loads(introduction)
    if not isinstance(peer, Peer):
        raise AuthenticationError(f"a message is introduced by {type(peer).__name__}, not by a Peer.")
    return peer
