"""Requests and replies as sealed bytes: who asks what of whom, and which reply belongs to which request.

The body of a request is the sender's `Peer` (pickled once, at the start), the method's name, and the payload's pickle.
The body of a reply is an answer as `requests` writes it. A refused message is None here; its sender gets `REFUSAL`.

A value is one pickle, and beside it the tensors that were anywhere inside the value.

Tensors are sent from where they lie, without a copy: a value must not change until its call is answered. They arrive in
memory of the receiver's own, on the CPU, without their history (``requires_grad`` is False), and only the elements that
the tensor shows: a view brings neither the rest of its storage nor an alias of it. One tensor that is in a value twice
is one tensor again; two tensors that share memory no longer do.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
import struct
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from torchstrat.core.errors import AuthenticationError
from torchstrat.parameter_server.interface import Peer
from torchstrat.parameter_server.transport.auth import Kind, Opened, Sealer

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SENT_AS_THEY_ARE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Packed:
    """A pickled value and its tensors, in the order in which the pickle refers to them."""

    data: bytes
    tensors: list[torch.Tensor] = field(default_factory=list)


def pack(value: Any) -> Packed:
    """Raises whatever pickling raises."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return Packed(buffer.getvalue(), pickler.tensors)


def unpack(packed: Packed) -> Any:
    """The value; its tensors are those of ``packed``. Raises whatever unpickling raises."""
    return _Unpickler(io.BytesIO(packed.data), packed.tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._storages: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad:
            value = value.detach()
        if type(value) not in _PLAIN or value.layout != torch.strided or value.is_quantized or value.is_meta:
            # Sparse tensors refer to plain ones, which come here again; the others pickle themselves.
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        tensor = _sendable(value)
        if tensor.dtype not in _SENT_AS_THEY_ARE:
            # The wire knows the dtypes of TorchScript only.
            return _with_dtype, (tensor.view(_CARRIERS[tensor.itemsize]), tensor.dtype)
        # The wire would bring shared storage once, for both.
        storage = tensor.untyped_storage().data_ptr()
        self.tensors.append(tensor.clone() if storage in self._storages else tensor)
        self._storages.add(storage)
        return _attached, (len(self.tensors) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _attached.__name__:
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _attached(index: int) -> torch.Tensor:
    """Stands for a tensor beside the pickle; `_Unpickler` knows which."""
    raise pickle.UnpicklingError(f"tensor {index} travelled beside this pickle; read it with unpack().")


def _with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(dtype)


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.numel() * tensor.itemsize != tensor.untyped_storage().nbytes():
        # The wire ships the whole storage of a large view. A view of less is copied; so is an expanded tensor.
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


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
