"""The coordinator's decisions, as a state machine: events in, actions out; no clock, no sockets, no threads.

::

    scheduler = Scheduler()
    for action in scheduler.handle(WorkerJoined(0, "a1")) + scheduler.handle(Submitted(0)):
        ...                                                    # Dispatch(function=0, worker=0, incarnation="a1", …)

The shell around it holds a lock over `handle`, carries the actions out in their order, and waits on a condition that it
notifies at `Quiet` and `AllDone`. Both come once, at the event after which they hold.

How functions run
    First in, first out; any worker with room takes the next, those with the least to do first. A function that was lost
    with its worker, or handed back, runs again before everything that never ran, oldest first. A result counts only if
    it comes from where the function is in flight now; whatever else arrives (from a process that was given up, twice,
    for a function that runs elsewhere again) changes nothing.

After an error
    The first one waits until the shell says that it was raised (`ErrorTaken`); a lost server goes before a function's
    own error. Meanwhile nothing is dispatched, what is in flight may finish, and what failed keeps its own error. When
    the error is taken, everything that waits is cancelled. What was submitted before that and is in flight even then
    never runs a second time and raises no second error: it completes, keeps its error, or is cancelled if it comes
    back.

Lost servers
    An error that is pending until taken, and a state (`servers_lost`) until `ServersRestored`, whichever comes first;
    nothing is dispatched during either. A loss is told even if the servers are back before anybody asked. Functions in
    flight at that time that fail because a process could not be reached (`CommunicationError`) are cancelled because of
    the loss. For that the shell has to report the loss before the failures that it causes.

Held dispatch
    Between `DispatchHeld` and `DispatchReleased` no function begins. Those that were begun and lost with their worker,
    or handed back, do run again: servers may have had a part of what they change. So once `at_rest` holds, each
    function has changed all that it changes, or nothing.

Removed workers
    `WorkerDraining` holds for the index: its process gets no more functions and is released when it has none, and a
    process that joins later under that index is ignored, unless the event says ``readmit``. Ignored incarnations may be
    offered again.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torchstrat.errors import CommunicationError, InvalidArgumentError
from torchstrat.parameter_server.scheduler_events import (
    Action,
    AllDone,
    Cancel,
    Complete,
    Dispatch,
    DispatchHeld,
    DispatchReleased,
    ErrorTaken,
    Event,
    Fail,
    Failed,
    Finished,
    Forget,
    HandedBack,
    Quiet,
    Release,
    ServersLost,
    ServersRestored,
    Submitted,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)

__all__ = ["Scheduler"]


class _Process:
    """One incarnation of a worker, from joining to loss or release."""

    __slots__ = ("draining", "functions", "incarnation", "leaving", "worker")

    def __init__(self, worker: int, incarnation: str) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.functions: set[int] = set()
        self.draining = False  # the user removes it
        self.leaving = False  # it said itself that it leaves


class Scheduler:
    """Which function runs where, and what becomes of it.

    What never ran needs no list. Numbers have no gaps, first dispatches go in their order, and only the whole queue is
    ever cancelled, so it is the interval from ``_next`` to ``_end``: a submission costs no memory, and every function
    below ``_next`` is in flight, waits to run again, or has its outcome.

    Args:
        in_flight_per_worker: How many functions a worker may have at once; the second waits there for the first.
        forget_every: `Forget` comes when this many functions more than last time have their outcomes, counted without
            a gap from the first one, and whenever all have.
        first_function: The number of the first function.
    """

    def __init__(self, in_flight_per_worker: int = 1, forget_every: int = 64, *, first_function: int = 0) -> None:
        for name, value in (("in_flight_per_worker", in_flight_per_worker), ("forget_every", forget_every)):
            if value < 1:
                raise InvalidArgumentError(f"{name}={value!r} must be at least 1.")
        self._room = in_flight_per_worker
        self._forget_every = forget_every
        self._first = self._next = self._end = self._low = self._forgotten = first_function
        self._again: list[int] = []  # to run again; descending, so that the oldest is popped from the end
        self._running: dict[int, _Process] = {}
        self._processes: dict[int, _Process] = {}
        # _free[n]: those that take functions and have n of them, the one that waits longest first. An OrderedDict,
        # since taking the first of a plain dict walks over everything that was ever deleted before it.
        self._free: list[OrderedDict[_Process, None]] = [OrderedDict() for _ in range(in_flight_per_worker)]
        self._removed: set[int] = set()
        self._seen: set[str] = set()
        self._function_error: BaseException | None = None
        self._server_error: BaseException | None = None
        self._servers_lost = False
        self._held = False
        self._taken_below = first_function  # what was submitted before an error was taken, and which one
        self._taken_error: BaseException | None = None
        self._loss_below = first_function  # the same of the last loss of servers
        self._loss: BaseException | None = None
        self._announced: type[Quiet] | type[AllDone] | None = AllDone
        self._handlers: dict[type, Callable[[Any, list[Action]], None]] = {
            Submitted: self._submitted,
            WorkerJoined: self._worker_joined,
            WorkerLost: self._worker_lost,
            WorkerDraining: self._worker_draining,
            Finished: self._finished,
            Failed: self._failed,
            HandedBack: self._handed_back,
            ServersLost: self._servers_were_lost,
            ServersRestored: self._servers_restored,
            ErrorTaken: self._error_taken,
            DispatchHeld: self._dispatch_held,
            DispatchReleased: self._dispatch_released,
        }

    # ---- questions ---------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every function has its outcome. An error may be pending."""
        return not self.unfinished

    @property
    def queued(self) -> int:
        """How many functions wait to be dispatched, for the first time or again."""
        return self._end - self._next + len(self._again)

    @property
    def in_flight(self) -> int:
        """How many functions are at workers."""
        return len(self._running)

    @property
    def unfinished(self) -> int:
        """How many functions have no outcome yet."""
        return self._end - self._next + len(self._again) + len(self._running)

    @property
    def next_function(self) -> int:
        """The number that the next submission has to have."""
        return self._end

    @property
    def pending_error(self) -> BaseException | None:
        """What `join`, `done` or `schedule` has to raise; a loss of servers goes before a function's error."""
        return self._function_error if self._server_error is None else self._server_error

    @property
    def servers_lost(self) -> bool:
        """Whether nothing can run until `ServersRestored`."""
        return self._servers_lost

    @property
    def quiet(self) -> bool:
        """Whether nothing is in flight nor will be: an error is pending, or functions wait for lost servers."""
        return not self._running and (
            self.pending_error is not None or (self._servers_lost and bool(self._again or self._next < self._end))
        )

    @property
    def at_rest(self) -> bool:
        """Whether no function is half-way, and none begins: dispatch is held. After an error what was to run again will
        not; then half of it may stay."""
        return self._held and not self._running and (not self._again or self.pending_error is not None)

    @property
    def workers(self) -> dict[int, str]:
        """Worker → incarnation of those that are given functions."""
        return {index: each.incarnation for index, each in self._processes.items() if _takes_functions(each)}

    def functions_at(self, worker: int) -> list[int]:
        """What is in flight at a worker, ascending."""
        process = self._processes.get(worker)
        return sorted(process.functions) if process is not None else []

    def worker_of(self, function: int) -> int | None:
        """Where a function is in flight; None if it waits, has its outcome, or is unknown."""
        process = self._running.get(function)
        return process.worker if process is not None else None

    # ---- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action]:
        """Take in one event; return what is to be done, in this order.

        Takes constant time, spread over the events (a cancellation pays for the submissions that it cancels).

        Raises:
            InvalidArgumentError: a submission has a number other than `next_function`; nothing has changed.
        """
        actions: list[Action] = []
        self._handlers[type(event)](event, actions)
        self._forget(actions)
        self._announce(actions)
        return actions

    def _submitted(self, event: Submitted, actions: list[Action]) -> None:
        if event.function != self._end:
            raise InvalidArgumentError(f"function {event.function} was submitted, but {self._end} is the next number.")
        self._end += 1
        self._announced = None
        self._dispatch(actions)

    def _worker_joined(self, event: WorkerJoined, actions: list[Action]) -> None:
        if event.incarnation in self._seen:
            return
        before = self._processes.get(event.worker)
        if before is not None:  # it died unnoticed
            self._lose(before, actions)
        if event.readmit:
            self._removed.discard(event.worker)
        if event.worker not in self._removed:
            self._seen.add(event.incarnation)
            process = self._processes[event.worker] = _Process(event.worker, event.incarnation)
            self._free[0][process] = None
        self._dispatch(actions)

    def _worker_lost(self, event: WorkerLost, actions: list[Action]) -> None:
        process = self._processes.get(event.worker)
        self._seen.add(event.incarnation)  # it must not join later: it may have been lost on its way in
        if process is not None and process.incarnation == event.incarnation:
            self._lose(process, actions)
            self._dispatch(actions)

    def _worker_draining(self, event: WorkerDraining, actions: list[Action]) -> None:
        self._removed.add(event.worker)
        process = self._processes.get(event.worker)
        if process is not None and not process.draining:
            self._withhold(process)
            process.draining = True
            self._release_if_empty(process, actions)

    def _finished(self, event: Finished, actions: list[Action]) -> None:
        process = self._take(event.worker, event.incarnation, event.function)
        if process is None:
            return
        actions.append(Complete(event.function))
        self._dispatch(actions, busy=process)
        self._release_if_empty(process, actions)

    def _failed(self, event: Failed, actions: list[Action]) -> None:
        process = self._take(event.worker, event.incarnation, event.function)
        if process is None:
            return
        if self._loss is not None and self._was_caused_by_loss(event):
            actions.append(Cancel(event.function, self._loss))
        else:
            actions.append(Fail(event.function, event.error))
            if self._function_error is None and event.function >= self._taken_below:
                self._function_error = event.error
        self._dispatch(actions, busy=process)
        self._release_if_empty(process, actions)

    def _handed_back(self, event: HandedBack, actions: list[Action]) -> None:
        if event.function is None:
            process = self._processes.get(event.worker)
            if process is None or process.incarnation != event.incarnation:
                return
        else:
            process = self._take(event.worker, event.incarnation, event.function)
            if process is None:
                return
            self._run_again((event.function,), actions)
        self._withhold(process)
        process.leaving = True
        self._dispatch(actions)
        self._release_if_empty(process, actions)

    def _servers_were_lost(self, event: ServersLost, actions: list[Action]) -> None:
        self._servers_lost = True
        if self._server_error is None:
            self._server_error = self._loss = event.error

    def _servers_restored(self, event: ServersRestored, actions: list[Action]) -> None:
        self._servers_lost = False
        self._dispatch(actions)

    def _error_taken(self, event: ErrorTaken, actions: list[Action]) -> None:
        error = self.pending_error
        if error is None:
            return
        actions.extend(Cancel(function, error) for function in reversed(self._again))
        actions.extend(Cancel(function, error) for function in range(self._next, self._end))
        self._again.clear()
        self._next = self._taken_below = self._end
        self._taken_error = error
        if self._server_error is not None:
            self._loss_below = self._end
        self._server_error = self._function_error = None
        self._announced = None

    def _dispatch_held(self, event: DispatchHeld, actions: list[Action]) -> None:
        self._held = True

    def _dispatch_released(self, event: DispatchReleased, actions: list[Action]) -> None:
        self._held = False
        self._dispatch(actions)

    # ---- the parts of events -----------------------------------------------------------------------------------------

    def _dispatch(self, actions: list[Action], busy: _Process | None = None) -> None:
        """Send out what can be sent. ``busy`` has just finished a function."""
        if self._servers_lost or self._server_error is not None or self._function_error is not None:
            return
        while self._again or (self._next < self._end and not self._held):
            process = self._next_free()
            if process is None:
                return
            if self._again:
                function = self._again.pop()
            else:
                function = self._next
                self._next += 1
            rested = not process.functions and process is not busy
            process.functions.add(function)
            self._running[function] = process
            if len(process.functions) < self._room:
                self._free[len(process.functions)][process] = None
            actions.append(Dispatch(function, process.worker, process.incarnation, rested))

    def _next_free(self) -> _Process | None:
        for level in self._free:
            if level:
                return level.popitem(last=False)[0]
        return None

    def _take(self, worker: int, incarnation: str, function: int) -> _Process | None:
        """Take a function off the process that it is in flight on; None for news that is out of date."""
        process = self._running.get(function)
        if process is None or process.worker != worker or process.incarnation != incarnation:
            return None
        del self._running[function]
        if not _takes_functions(process):
            process.functions.remove(function)
            return process
        count = len(process.functions)
        if count < self._room:
            del self._free[count][process]
        process.functions.remove(function)
        self._free[count - 1][process] = None
        return process

    def _withhold(self, process: _Process) -> None:
        """Give it no more functions. Called before what it is marked with for that."""
        if _takes_functions(process) and len(process.functions) < self._room:
            del self._free[len(process.functions)][process]

    def _lose(self, process: _Process, actions: list[Action]) -> None:
        self._withhold(process)
        del self._processes[process.worker]
        for function in process.functions:
            del self._running[function]
        self._run_again(sorted(process.functions), actions)
        if process.draining:
            actions.append(Release(process.worker, process.incarnation))

    def _release_if_empty(self, process: _Process, actions: list[Action]) -> None:
        if process.draining and not process.functions:
            del self._processes[process.worker]
            actions.append(Release(process.worker, process.incarnation))

    def _run_again(self, functions: Iterable[int], actions: list[Action]) -> None:
        # There are never more of them than were in flight at once, so that keeping them sorted costs next to nothing.
        for function in functions:
            if self._taken_error is not None and function < self._taken_below:
                actions.append(Cancel(function, self._taken_error))
            else:
                insort(self._again, function, key=_descending)

    def _was_caused_by_loss(self, event: Failed) -> bool:
        in_flight_then = self._server_error is not None or event.function < self._loss_below
        return in_flight_then and isinstance(event.error, CommunicationError)

    def _forget(self, actions: list[Action]) -> None:
        oldest = self._again[-1] if self._again else self._next
        while self._low < oldest and self._low not in self._running:
            self._low += 1
        if self._low - self._forgotten >= self._forget_every or self._low == self._end > self._forgotten:
            self._forgotten = self._low
            actions.append(Forget(self._low))

    def _announce(self, actions: list[Action]) -> None:
        state: type[Quiet] | type[AllDone] | None = None
        if self._running:
            pass  # neither can hold; this is the usual case, and the cheap one
        elif self.quiet:
            state = Quiet
        elif not self.unfinished and self.pending_error is None:
            state = AllDone
        if state is not None and state is not self._announced:
            actions.append(state())
        self._announced = state

    # ---- invariants --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what always holds. Takes time in proportion to workers and functions in flight, not to the queue."""
        assert self._first <= self._forgotten <= self._low <= self._next <= self._end
        assert self._again == sorted(set(self._again), reverse=True), "out of order, or twice in the queue"
        waiting, flying = set(self._again), set(self._running)
        assert not waiting & flying, "queued and in flight"
        assert all(self._low <= function < self._next for function in waiting | flying), "below the watermark, or new"
        at_workers = [function for process in self._processes.values() for function in process.functions]
        assert sorted(at_workers) == sorted(flying), "in flight twice, or at no live process"
        for function, process in self._running.items():
            assert self._processes[process.worker] is process, "in flight at a process that was lost"
            assert function in process.functions
        for index, process in self._processes.items():
            count = len(process.functions)
            assert process.worker == index
            assert process.incarnation in self._seen
            assert count <= self._room, "more in flight than agreed"
            assert count or not process.draining, "drained and not released"
            levels = [level for level, free in enumerate(self._free) if process in free]
            assert levels == ([count] if _takes_functions(process) and count < self._room else []), "wrongly free"
        assert sum(map(len, self._free)) <= len(self._processes), "a lost process is offered functions"
        if self.pending_error is None and not self._servers_lost and (self._again if self._held else self.queued):
            assert not any(self._free), "a worker idles while functions wait"


def _takes_functions(process: _Process) -> bool:
    return not process.draining and not process.leaving


def _descending(function: int) -> int:
    return -function
