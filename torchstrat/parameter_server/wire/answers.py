"""What happens to a request once it has arrived, and what its answer says; the same on every transport.

An answer is a `Packed` whose first byte tells a result from a failure. A handler's exception arrives at the caller with
its own type and attributes where it can be pickled, as `RemoteHandlerError` otherwise, always with a note in its
``__notes__`` (Python 3.11 and later show them below the traceback): where it was raised, with the traceback there.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from typing import Any

from torchstrat.errors import CommunicationError, FencedError, NotSendableError, TorchstratError
from torchstrat.parameter_server.endpoint import Handler
from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.wire.payloads import Packed, pack, unpack

_RESULT = b"\x00"
_FAILURE = b"\x01"

Reply = Callable[[Packed], None]


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

    def answer(self, sender: Peer, method: str, payload: Packed, reply: Reply) -> None:
        refusal = self.refusal(sender, method)
        if refusal is not None:
            reply(refusal)
            return
        where = f"{self._peer}, answering {method!r}"
        handler = self._handlers.get(method)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "nothing yet"
            error = CommunicationError(f"{self._peer} does not answer {method!r}; it answers {known}.")
            reply(pack_failure(error, where))
        elif handler.executor is None:
            reply(_outcome(handler, sender, payload, where))
        else:
            self._hand_over(handler, sender, payload, where, reply)

    def _hand_over(self, handler: Handler, sender: Peer, payload: Packed, where: str, reply: Reply) -> None:
        assert handler.executor is not None
        try:
            work = handler.executor.submit(_outcome, handler, sender, payload, where)
        except RuntimeError as error:  # it has been shut down
            reply(pack_failure(CommunicationError(f"{self._peer} is closing: {error}."), where))
            return
        # Not inside the work itself: an executor that is shut down drops what it has not begun, and says so here only.
        work.add_done_callback(lambda done: reply(self._outcome_of(done, where)))

    def _outcome_of(self, work: Future[Packed], where: str) -> Packed:
        try:
            return work.result()
        except FutureCancelledError:
            return pack_failure(CommunicationError(f"{self._peer} is closing; it has not begun this call."), where)


def _outcome(handler: Handler, sender: Peer, payload: Packed, where: str) -> Packed:
    """Unpickle, run, pickle: whatever may take long or fail, on the handler's thread."""
    try:
        result = handler.answer(sender, unpack(payload))
    except BaseException as error:
        # Whatever a handler raises ends its call and nothing else; the thread is not its own to end.
        return pack_failure(error, where)
    try:
        return pack_result(result)
    except Exception as error:
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
