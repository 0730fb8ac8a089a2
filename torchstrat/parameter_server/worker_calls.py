"""The dispatcher's calls to workers, and what they answer and report, as news for the scheduler.

Without the dispatcher's lock. What comes back is on a thread of the transport, or on the caller's if it failed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchstrat.cluster_spec import PARAMETER_SERVER
from torchstrat.errors import CommunicationError, NotSendableError, ParameterServerUnavailable
from torchstrat.parameter_server.dispatch import Batch, Report, ServerGone
from torchstrat.parameter_server.job import Job
from torchstrat.parameter_server.known_worker import KnownWorker, without_unsendable
from torchstrat.parameter_server.scheduler_events import (
    Event,
    Failed,
    Finished,
    HandedBack,
    WorkerLeaves,
    WorkerLost,
)
from torchstrat.parameter_server.serialization.functions import Packed, unpack_exception
from torchstrat.parameter_server.tasks import Peer, Task

_UNLIMITED_SECONDS = math.inf  # functions take as long as they take; a worker that is gone ends the call


@dataclass(slots=True)
class News:
    """Events of one report, which belong together, and the results of the functions that finished, opened."""

    incarnation: str
    events: list[Event]
    results: Sequence[Any] = ()
    report: Report | None = None


class WorkerCalls:
    """Thread-safe.

    Args:
        unpack: opens what a worker returned.
        is_over: told of a batch that was answered, or will not be; gives its functions.
        take: takes in news.
    """

    def __init__(
        self,
        job: Job,
        unpack: Callable[[Any], Any],
        is_over: Callable[[KnownWorker, int], tuple[int, ...]],
        take: Callable[[News], None],
    ) -> None:
        self._job, self._unpack = job, unpack
        self._is_over, self._take = is_over, take
        self.is_closed = False

    def send_batch(self, known: KnownWorker, batch: Batch) -> None:
        future = self._call(known.peer, "worker.run", batch)
        error = future.exception() if future.done() else None
        if isinstance(error, NotSendableError) and not hasattr(error, "__notes__"):  # not told by the worker
            rest, faults = without_unsendable(batch, error)
            self._tell(known.peer, [Failed(*_names(known.peer), *fault) for fault in faults.items()])
            future = self._call(known.peer, "worker.run", rest)
        future.add_done_callback(partial(self._answered, known, batch.number))

    def send_recall(self, known: KnownWorker, recalled: Any) -> None:
        future = self._call(known.peer, "worker.recall", recalled)
        future.add_done_callback(partial(self._handed_back, known.peer))

    def left_gradients(self, peers: Iterable[Peer], numbers: Sequence[int]) -> set[int]:
        """Those of the parameters with these numbers that have a gradient on a worker. One that is lost has none."""
        calls = [self._call(peer, "worker.left_gradients", tuple(numbers)) for peer in peers]
        wait(calls, timeout=self._job.timeout_seconds)
        return {number for call in calls if call.done() and call.exception() is None for number in call.result()}

    def _call(self, peer: Peer, method: str, payload: Any) -> Future[Any]:
        try:
            return self._job.endpoint.call(peer, method, payload, timeout_seconds=_UNLIMITED_SECONDS)
        except Exception as error:  # whatever it is, it is the functions' error, and not that of who happens to send
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _answered(self, known: KnownWorker, number: int, done: Future[Any]) -> None:
        if self.is_closed:
            return
        functions = self._is_over(known, number)
        error = done.exception()
        if error is None:
            self.reported(known.peer, done.result())
        elif isinstance(error, CommunicationError):
            # Usually the membership knows by now. A process that lives and cannot be talked to must start afresh.
            self._job.membership.give_up(known.peer, f"its answer did not come: {error}")
            self._tell(known.peer, [WorkerLost(*_names(known.peer), f"its answer did not come: {error}")])
        else:
            self._tell(known.peer, [Failed(*_names(known.peer), function, error) for function in functions])

    def _handed_back(self, peer: Peer, done: Future[Any]) -> None:
        if done.exception() is None and done.result():  # an error is told by the batches' calls
            self._tell(peer, [HandedBack(*_names(peer), done.result())])

    def reported(self, peer: Peer, report: Report) -> None:
        """A report has come, before a batch's end or at it."""
        if self.is_closed:
            return
        events: list[Event] = []
        for function, outcome in report.ended:  # first of all: after an error nothing more is sent
            if isinstance(outcome, ServerGone):
                self._job.server_gone(peer, outcome, then=partial(self._failed_without_server, peer, function, outcome))
            else:
                events.append(Failed(*_names(peer), function, unpack_exception(outcome, self._unpack)))
        results: Sequence[Any] = report.results
        if Packed in map(type, results):
            results, faults = self._unpacked(report)
            events += [Failed(*_names(peer), *fault) for fault in faults.items()]
        if report.leaving:
            events.append(WorkerLeaves(*_names(peer)))
        if report.finished:
            events.append(Finished(*_names(peer), report.finished, report.seconds))
        if report.handed_back:
            events.append(HandedBack(*_names(peer), report.handed_back))
        self._take(News(peer.incarnation, events, results, report))

    def _unpacked(self, report: Report) -> tuple[list[Any], dict[int, BaseException]]:
        """The results, and the errors of those that cannot be opened."""
        results: list[Any] = []
        faults: dict[int, BaseException] = {}
        for function, result in zip(report.finished, report.results, strict=True):
            try:
                results.append(self._unpack(result) if type(result) is Packed else result)
            except Exception as problem:
                results.append(None)
                faults[function] = problem
        return results, faults

    def _failed_without_server(self, peer: Peer, function: int, outcome: ServerGone) -> None:
        error = ParameterServerUnavailable(outcome.message, Task(PARAMETER_SERVER, outcome.index))
        self._tell(peer, [Failed(*_names(peer), function, error)])

    def _tell(self, peer: Peer, events: list[Any]) -> None:
        self._take(News(peer.incarnation, events))


def _names(peer: Peer) -> tuple[int, str]:
    """By which the scheduler knows a process."""
    return peer.task.index, peer.incarnation
