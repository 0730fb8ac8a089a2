"""Requests and answers as sealed bytes, and what happens to a request once it has arrived: the same on every transport.

The body of a request is the sender's `Peer` (pickled once, at the start), the method's name, and the payload's pickle.
A refused message is None here; its sender gets `REFUSAL`. An answer is a `Packed` whose first byte tells a result from
a failure. A handler's exception arrives at the caller with its own type and attributes where it can be pickled, as
`RemoteHandlerError` otherwise, always with a note in its ``__notes__`` (Python 3.11 and later show them below the
traceback): where it was raised, with the traceback there.

`Waiting` is the callers' side: who waits for whom, and that each is told exactly once.

A value is one pickle, and beside it the tensors that were anywhere inside the value. Tensors are sent from where they
lie, without a copy: a value must not change until its call is answered. They arrive in memory of the receiver's own, on
the CPU, without their history (``requires_grad`` is False), and only the elements that the tensor shows: a view brings
neither the rest of its storage nor an alias of it. One tensor that is in a value twice is one tensor again; two tensors
that share memory no longer do.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
import pickle
import struct
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from torchstrat.core.errors import (
    AuthenticationError,
    CommunicationError,
    FencedError,
    NotSendableError,
    PeerUnavailableError,
    TorchstratError,
)
from torchstrat.parameter_server.interface import FRESH, AnswerMemory, Handler, Peer
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


def pack(value: object) -> Packed:
    """Raises whatever pickling raises."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return Packed(buffer.getvalue(), pickler.tensors)


def unpack(packed: Packed) -> object:
    """The value; its tensors are those of ``packed``. Raises whatever unpickling raises."""
    return _Unpickler(io.BytesIO(packed.data), packed.tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._storages: set[int] = set()

    def reducer_override(self, value: object) -> Any:
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

    def find_class(self, module: str, name: str) -> object:
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


class Waiting:
    """The futures that wait for answers, by the incarnation they wait for. Each is settled exactly once, by whoever
    comes first: an answer, a timeout, `fail` because its peer was removed, the end. Thread-safe.

    Each gets an exception of its own: one that was raised keeps everything that the raising functions held, and those
    here are kept for whoever calls later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, set[Future[object]]] = {}
        self._refused: dict[str, BaseException] = {}
        self._closed: BaseException | None = None

    def add(self, incarnation: str) -> Future[object]:
        """A new future that waits for this peer; it has failed already if the peer's waiting futures have."""
        future: Future[object] = Future()
        future.set_running_or_notify_cancel()  # so that nobody can cancel it: the message is on its way
        with self._lock:
            error = self._closed or self._refused.get(incarnation)
            if error is None:
                self._futures.setdefault(incarnation, set()).add(future)
                return future
        future.set_exception(copy.copy(error))
        return future

    def claim(self, incarnation: str, future: Future[object]) -> bool:
        """Whether the caller is the one to settle it."""
        with self._lock:
            futures = self._futures.get(incarnation, set())
            claimed = future in futures
            futures.discard(future)
            return claimed

    def fail(self, incarnation: str, error: BaseException) -> None:
        """Fail what waits for this peer, now and later."""
        with self._lock:
            self._refused.setdefault(incarnation, error)
            failing = self._futures.pop(incarnation, set())
        for future in failing:
            future.set_exception(copy.copy(error))

    def fail_removed(self, peer: Peer, reason: str | None) -> None:
        """Fail what waits for a peer that was removed; ``reason``: why it was."""
        text = f"{peer} was removed from the cluster" + ("." if reason is None else f": {reason}.")
        self.fail(peer.incarnation, PeerUnavailableError(text, peer))

    def close(self, error: BaseException) -> None:
        with self._lock:
            self._closed = self._closed or error
            failing = [future for futures in self._futures.values() for future in futures]
            self._futures.clear()
        for future in failing:
            future.set_exception(copy.copy(error))


_RESULT = b"\x00"
_FAILURE = b"\x01"

Reply = Callable[[Packed], None]


@dataclass(frozen=True)
class Incoming:
    """A request that is authentic. ``memory``: where its sender would like the answer's tensors.

    ``is_borrowed``: the payload's tensors lie in memory of the sender's, which is its own again once it is answered;
    and it has a thread here to itself, the one that brings this.
    """

    sender: Peer
    method: str
    payload: Packed
    memory: AnswerMemory = FRESH
    is_borrowed: bool = False


class RemoteHandlerError(TorchstratError, RuntimeError):
    """Another process raised an exception that cannot travel; the text is its class and message."""


class Answerer:
    """One process's handlers. Thread-safe.

    `answer` never raises, and calls ``reply`` exactly once, from whatever thread the handler ran on.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._handlers: dict[str, Handler] = {}
        self._fenced: set[str] = set()

    def serve(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = {**self._handlers, **handlers}  # replaced, not changed: others are reading it

    def fence(self, incarnation: str) -> None:
        """Refuse what this process sends from now on."""
        self._fenced = {*self._fenced, incarnation}

    def is_fenced(self, incarnation: str) -> bool:
        return incarnation in self._fenced

    def refusal(self, sender: Peer, method: str) -> Packed | None:
        """The answer to a sender that has been given up."""
        if sender.incarnation not in self._fenced:
            return None
        return pack_failure(
            FencedError(f"{self._peer} no longer takes {method!r} from {sender}, which its cluster has given up."),
            f"{self._peer}, refusing {method!r}",
        )

    def answer(self, request: Incoming, reply: Reply) -> None:
        refusal = self.refusal(request.sender, request.method)
        if refusal is not None:
            reply(refusal)
            return
        handler = self._handlers.get(request.method)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "nothing yet"
            error = CommunicationError(f"{self._peer} does not answer {request.method!r}; it answers {known}.")
            reply(pack_failure(error, self._where(request)))
        elif handler.executor is None or (handler.may_hold_up_its_caller and request.is_borrowed):
            reply(self._outcome(handler, request))
        else:
            self._hand_over(handler.executor, handler, request, reply)

    def _where(self, request: Incoming) -> str:
        return f"{self._peer}, answering {request.method!r}"

    def _hand_over(self, executor: Executor, handler: Handler, request: Incoming, reply: Reply) -> None:
        try:
            work = executor.submit(self._outcome, handler, request)
        except RuntimeError as error:  # it has been shut down
            reply(pack_failure(CommunicationError(f"{self._peer} is closing: {error}."), self._where(request)))
            return
        # Not inside the work itself: an executor that is shut down drops what it has not begun, and says so here only.
        work.add_done_callback(lambda done: reply(self._outcome_of(done, request)))

    def _outcome_of(self, work: Future[Packed], request: Incoming) -> Packed:
        try:
            return work.result()
        except FutureCancelledError:
            error = CommunicationError(f"{self._peer} is closing; it has not begun this call.")
            return pack_failure(error, self._where(request))

    def _outcome(self, handler: Handler, request: Incoming) -> Packed:
        """Unpickle, run, pickle: whatever may take long or fail, on the handler's thread."""
        payload = request.payload
        if request.is_borrowed and not handler.borrows and payload.tensors:
            payload = Packed(payload.data, [tensor.clone() for tensor in payload.tensors])
        arguments = (request.memory,) if handler.takes_memory else ()
        try:
            result = handler.answer(request.sender, unpack(payload), *arguments)
        except BaseException as error:
            # Whatever a handler raises ends its call and nothing else; the thread is not its own to end.
            return pack_failure(error, self._where(request))
        try:
            return pack_result(result)
        except Exception as error:
            where = self._where(request)
            return pack_failure(NotSendableError(f"the result of {where} cannot be sent: {_text(error)}"), where)


def pack_result(result: object) -> Packed:
    """The answer that returns ``result`` at the caller. Raises whatever pickling raises."""
    packed = pack(result)
    return Packed(_RESULT + packed.data, packed.tensors)


def pack_request(payload: object, method: str) -> Packed:
    """Raises `NotSendableError`."""
    try:
        return pack(payload)
    except Exception as error:
        raise NotSendableError(f"the payload of {method!r} cannot be sent: {_text(error)}") from error


def pack_failure(error: BaseException, where: str) -> Packed:
    """The answer that raises ``error`` at the caller. ``where`` ends the sentence "raised by …"."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    note = f"raised by {where}:\n{text}"
    try:
        packed = pack(error) if isinstance(error, Exception) else Packed(b"")
    except Exception:
        packed = Packed(b"")
    return Packed(_FAILURE + pickle.dumps((_text(error), note, packed.data)), packed.tensors)


def result_of(answer: Packed) -> object:
    """The result in an answer. Raises the failure in it."""
    content = Packed(answer.data[1:], answer.tensors)
    if answer.data[:1] == _RESULT:
        return unpack(content)
    text, note, data = pickle.loads(content.data)
    error = _exception(Packed(data, content.tensors)) or RemoteHandlerError(text)
    # `add_note` is not there before Python 3.11, which is when tracebacks began to show what it keeps.
    error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
    raise error


def _exception(packed: Packed) -> Exception | None:
    try:
        error = unpack(packed)
    except Exception:  # a class that this process lacks, or that cannot be built again from its arguments
        return None
    return error if isinstance(error, Exception) else None


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()
