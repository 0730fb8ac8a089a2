"""A thread that does one thing at a time, for everybody else."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torchstrat.errors import CommunicationError

Result = TypeVar("Result")
End = TypeVar("End")


@dataclass(frozen=True)
class _Event:
    """With an ``answer`` somebody waits for what the action returns or raises."""

    action: Callable[[], Any]
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
    except Exception as error:
        event.answer.set_exception(error)
    return None
