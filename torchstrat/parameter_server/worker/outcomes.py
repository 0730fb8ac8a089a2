"""Outcomes on their way to the coordinator: with the batch's answer, or before it where that takes long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from torchstrat.errors import NotSendableError
from torchstrat.parameter_server.dispatch import Raised, Report
from torchstrat.parameter_server.endpoint import Endpoint
from torchstrat.parameter_server.tasks import Peer
from torchstrat.parameter_server.transport.envelopes import pack

_PATIENCE_SECONDS = 0.005
"""How long an outcome waits for others to be reported with."""


class Outcomes:
    """Those of the batch that runs, from the function's end to the report.

    A thread of its own reports them when the oldest has waited for `_PATIENCE_SECONDS`, whatever runs meanwhile. It
    starts when a batch first has more than one function, and sleeps while there is nothing to report.
    """

    def __init__(self, endpoint: Callable[[], Endpoint], clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._to: Peer | None = None
        self._finished: list[int] = []
        self._results: list[Any] = []
        self._seconds = 0.0
        self._left: tuple[int, ...] = ()
        self._wrote_parameters = self._accumulates = False
        self._oldest = 0.0
        self._is_watched = False  # the thread wakes in time
        self._closed = False
        self._thread: threading.Thread | None = None

    def note(self, left: tuple[int, ...], *, wrote_parameters: bool, accumulates: bool) -> None:
        """How things are here after the function whose outcome comes next, see `Report`."""
        self._left, self._wrote_parameters, self._accumulates = left, wrote_parameters, accumulates

    def add(self, to: Peer, function: int, result: Any, seconds: float, *, is_last: bool) -> None:
        """A function of ``to`` has returned. ``is_last``: the report of the batch comes now."""
        with self._lock:
            self._to = to
            self._finished.append(function)
            self._results.append(result)
            self._seconds += seconds
            if len(self._finished) == 1 and not is_last:
                self._oldest = self._clock()
                if not self._is_watched:
                    self._watch()

    def rest(self, **others: Any) -> Report:
        """The batch's last report: what was not reported before, and ``others``."""
        with self._lock:
            return self._take(**others)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """After `close`: wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _take(self, **others: Any) -> Report:
        report = Report(
            tuple(self._finished),
            tuple(self._results),
            self._seconds,
            left=self._left,
            wrote_parameters=self._wrote_parameters,
            accumulates=self._accumulates,
            **others,
        )
        self._finished.clear()
        self._results.clear()
        self._seconds = 0.0
        return report

    def _watch(self) -> None:
        self._is_watched = True
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._loop, name="torchstrat-outcomes", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not self._closed and (wait := self._seconds_left()) > 0:
                    self._is_watched = wait != math.inf
                    self._changed.wait(wait if self._is_watched else None)
                if self._closed:
                    return
                report, to = self._take(), self._to
            assert to is not None
            self._send(to, report)

    def _seconds_left(self) -> float:
        return self._oldest + _PATIENCE_SECONDS - self._clock() if self._finished else math.inf

    def _send(self, to: Peer, report: Report) -> None:
        # Without a limit of time: it fails when the coordinator is gone, which ends all that this is about.
        sent = self._endpoint().call(to, "coordinator.outcomes", report, timeout_seconds=math.inf)
        if sent.done() and isinstance(sent.exception(), NotSendableError):
            self._endpoint().call(to, "coordinator.outcomes", _sendable(report), timeout_seconds=math.inf)


def _sendable(report: Report) -> Report:
    """The same, with an error in the place of each result that cannot be sent."""
    finished, results, ended = [], [], list(report.ended)
    for function, result in zip(report.finished, report.results, strict=True):
        try:
            pack(result)
        except Exception as error:
            ended.append(
                (function, Raised(NotSendableError(f"the result of function {function} cannot be sent: {error}")))
            )
        else:
            finished.append(function)
            results.append(result)
    return report._replace(finished=tuple(finished), results=tuple(results), ended=tuple(ended))
