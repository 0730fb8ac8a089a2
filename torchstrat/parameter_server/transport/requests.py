"""What happens to a request once it has arrived, and what its answer says; the same on every transport.

An answer is a `Packed` whose first byte tells a result from a failure. A handler's exception arrives at the caller with
its own type and attributes where it can be pickled, as `RemoteHandlerError` otherwise, always with a note in its
``__notes__`` (Python 3.11 and later show them below the traceback): where it was raised, with the traceback there.

`Waiting` is the callers' side: who waits for whom, and that each is told exactly once.
"""

from __future__ import annotations

import copy
import pickle
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from torchstrat.core.errors import (
    CommunicationError,
    FencedError,
    NotSendableError,
    PeerUnavailableError,
    TorchstratError,
)
from torchstrat.parameter_server.interface import FRESH, AnswerMemory, Handler, Peer
from torchstrat.parameter_server.transport.envelopes import Packed, pack, unpack


class Waiting:
    """The futures that wait for answers, by the incarnation they wait for. Each is settled exactly once, by whoever
    comes first: an answer, a timeout, `fail` because its peer was removed, the end. Thread-safe.

    Each gets an exception of its own: one that was raised keeps everything that the raising functions held, and those
    here are kept for whoever calls later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, set[Future[Any]]] = {}
        self._refused: dict[str, BaseException] = {}
        self._closed: BaseException | None = None

    def add(self, incarnation: str) -> Future[Any]:
        """A new future that waits for this peer; it has failed already if the peer's waiting futures have."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # so that nobody can cancel it: the message is on its way
        with self._lock:
            error = self._closed or self._refused.get(incarnation)
            if error is None:
                self._futures.setdefault(incarnation, set()).add(future)
                return future
        future.set_exception(copy.copy(error))
        return future

    def claim(self, incarnation: str, future: Future[Any]) -> bool:
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


def pack_result(result: Any) -> Packed:
    """The answer that returns ``result`` at the caller. Raises whatever pickling raises."""
    packed = pack(result)
    return Packed(_RESULT + packed.data, packed.tensors)


def pack_request(payload: Any, method: str) -> Packed:
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


def result_of(answer: Packed) -> Any:
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
