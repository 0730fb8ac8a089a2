"""The coordinator's decisions, as a state machine: events in, actions out; no clock, no sockets, no threads.

::

    scheduler = Scheduler()
    for action in scheduler.handle(WorkerJoined(0, "a1")) + scheduler.handle(Submitted(0)):
        ...                                                    # Dispatch(functions=(0,), worker=0, …)

The shell around it holds a lock over `handle`, and carries the actions out in their order.

How functions run
    In batches, first in, first out; any worker with room takes the next batch, those with the least to do first. A
    batch is a share of what waits, as long as the worker takes some milliseconds for it by what functions took so far,
    so that where functions are long, or few wait, it is a single one. A function that was lost with its worker runs
    again before everything else (see below), then comes what was handed back, then what was never sent, each oldest
    first. A result
    counts only if it comes from where the function is in flight now; whatever else arrives (from a process that was
    given up, twice, for a function that runs elsewhere again) changes nothing.

Recalled functions
    While a worker idles, nothing waits and another has more than one function, a process that reports no outcome for a
    moment (the shell measures it) is *stalled*: the one that it runs takes long. It is asked to hand back the later
    half of what it has; the halves that follow at once, until the others idle no more or it has only one. It hands back
    what it has not begun, and gets nothing until it reports an outcome, so that what was taken from it does not go
    back. Every process is asked for all that it has not begun when an error comes up, servers are lost or dispatch is
    held, and a worker when it is removed. What comes back has changed nothing, unless an earlier worker had begun it.

After an error
    The first one waits until the shell says that it was raised (`ErrorTaken`); a lost server goes before a function's
    own error. Meanwhile nothing is dispatched, what was begun may finish, and what failed keeps its own error. When
    the error is taken, everything that waits is cancelled. What was submitted before that and is in flight even then
    never runs a second time and raises no second error: it completes, keeps its error, or is cancelled if it comes
    back.

Lost servers
    An error that is pending until taken, and a state (`servers_lost`) until `ServersRestored`, whichever comes first;
    nothing is dispatched during either. A loss is told even if the servers are back before anybody asked. Functions in
    flight at that time that fail because a process could not be reached (`CommunicationError`) are cancelled because of
    the loss. For that the shell has to report the loss before the failures that it causes.

Held dispatch
    Between `DispatchHeld` and `DispatchReleased` no function begins. Those that were lost with their worker, which may
    have begun them, do run again: servers may have had a part of what they change. So once `at_rest` holds, each
    function has changed all that it changes, or nothing.

Lost functions
    What was lost with a worker, which may have begun it, runs again by itself: on a worker that has nothing else, and
    gets nothing else meanwhile. So if that worker is lost too, it is known with what. A function that was lost twice
    first lets everything begin that waits at that time, at workers too: its error cancels none of it. One that was lost
    by itself, and ``max_attempts`` times in all, is set aside: its outcome is an error.

Removed workers
    `WorkerDraining` holds for the index: its process gets no more functions and is released when it has none, and a
    process that joins later under that index is ignored, unless the event says ``readmit``. Ignored incarnations may be
    offered again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from torchstrat.core.errors import CommunicationError, FunctionSetAsideError, InvalidArgumentError
from torchstrat.parameter_server.scheduler_events import (
    Action,
    AwaitMoment,
    Batch,
    Cancel,
    Complete,
    Dispatch,
    DispatchHeld,
    DispatchReleased,
    Durations,
    ErrorTaken,
    Event,
    Fail,
    Failed,
    Finished,
    Forget,
    HandedBack,
    LostFunctions,
    MomentPassed,
    Process,
    Recall,
    Release,
    ServersLost,
    ServersRestored,
    Submitted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeaves,
    WorkerLost,
    takes_functions,
)

__all__ = ["LARGEST_BATCH", "Scheduler"]

LARGEST_BATCH = 256
_FEWEST_SHARES = 4
"""Into how many batches what waits is cut at least: two workers with two batches each."""


class Scheduler:
    """Which function runs where, and what becomes of it.

    What was never sent needs no list. Numbers have no gaps, first dispatches go in their order, and only the whole
    queue is ever cancelled, so it is the interval from ``_next`` to ``_end``: a submission costs no memory, and every
    function below ``_next`` is in flight, waits to be sent again, or has its outcome.

    Args:
        batches_per_worker: How many batches a worker may have at once; the second waits there for the first.
        forget_every: `Forget` comes when this many functions more than last time have their outcomes, counted without
            a gap from the first one.
        first_function: The number of the first function.
    """

    def __init__(self, batches_per_worker: int = 2, forget_every: int = 256, *, first_function: int = 0) -> None:
        for name, value in (("batches_per_worker", batches_per_worker), ("forget_every", forget_every)):
            if value < 1:
                raise InvalidArgumentError(f"{name}={value!r} must be at least 1.")
        self._room = batches_per_worker
        self._forget_every = forget_every
        self._first = self._next = self._end = self._low = self._forgotten = first_function
        self._again: list[int] = []  # a heap: what may have been begun, to run again
        self._back: list[int] = []  # a heap: what was sent, and came back without having been begun by anybody
        self._lost = LostFunctions()
        self._later: deque[tuple[int, int]] = deque()  # of that, what waits until all below a number has been begun
        self._running: dict[int, Batch] = {}
        self._processes: dict[int, Process] = {}
        self._busy = 0  # how many processes have functions
        self._stalled: dict[Process, None] = {}
        # _free[n]: those that take functions and have n batches, the one that waits longest first. An OrderedDict,
        # since taking the first of a plain dict walks over everything that was ever deleted before it.
        self._free: list[OrderedDict[Process, None]] = [OrderedDict() for _ in range(batches_per_worker)]
        self._removed: set[int] = set()
        self._seen: set[str] = set()
        self._durations = Durations()
        self._awaits_moment = False
        self._function_error: BaseException | None = None
        self._server_error: BaseException | None = None
        self._servers_lost = False
        self._held = False
        self._taken_below = first_function  # what was submitted before an error was taken, and which one
        self._taken_error: BaseException | None = None
        self._loss_below = first_function  # the same of the last loss of servers
        self._loss: BaseException | None = None
        self._handlers: dict[type, Callable[[Any, list[Action]], None]] = {
            Submitted: self._submitted,
            WorkerJoined: self._worker_joined,
            WorkerLost: self._worker_lost,
            WorkerDraining: self._worker_draining,
            WorkerLeaves: self._worker_leaves,
            Finished: self._finished,
            Failed: self._failed,
            HandedBack: self._handed_back,
            MomentPassed: self._moment_passed,
            ServersLost: self._servers_were_lost,
            ServersRestored: self._servers_restored,
            ErrorTaken: self._error_taken,
            DispatchHeld: self._dispatch_held,
            DispatchReleased: self._dispatch_released,
        }

    # ---- questions ---------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """How many functions wait to be dispatched, for the first time or again."""
        return self._end - self._next + len(self._back) + len(self._again) + len(self._later)

    @property
    def in_flight(self) -> int:
        """How many functions are at workers."""
        return len(self._running)

    @property
    def ended_below(self) -> int:
        """Every function below this number has its outcome, by the last event that was no submission."""
        return self._low

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
    def at_rest(self) -> bool:
        """Whether no function is half-way, and none begins: dispatch is held. After an error what was to run again will
        not; then half of it may stay."""
        return self._held and not self._running and (not self._lost_ones or self.pending_error is not None)

    @property
    def _lost_ones(self) -> int:
        """How many wait that were lost."""
        return len(self._again) + len(self._later)

    @property
    def workers(self) -> dict[int, str]:
        """Worker → incarnation of those that are given functions."""
        return {index: each.incarnation for index, each in self._processes.items() if takes_functions(each)}

    def functions_at(self, worker: int) -> list[int]:
        """What is in flight at a worker, in the order in which it runs them: it runs the first, if its news are here,
        and has not begun the others."""
        process = self._processes.get(worker)
        return process.functions if process is not None else []

    def first_at(self, worker: int) -> int | None:
        """The first of `functions_at`."""
        process = self._processes.get(worker)
        return next(iter(process.batches[0].functions)) if process is not None and process.batches else None

    def worker_of(self, function: int) -> int | None:
        """Where a function is in flight; None if it waits, has its outcome, or is unknown."""
        batch = self._running.get(function)
        return batch.process.worker if batch is not None else None

    def is_at(self, function: int, worker: int, incarnation: str) -> bool:
        """Whether a function is in flight at this process."""
        batch = self._running.get(function)
        return batch is not None and (batch.process.worker, batch.process.incarnation) == (worker, incarnation)

    # ---- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action]:
        """Take in one event; return what is to be done, in this order.

        Takes constant time, spread over the events (a cancellation pays for the submissions that it cancels).

        Raises:
            InvalidArgumentError: a submission has a number other than `next_function`; nothing has changed.
        """
        actions: list[Action] = []
        self._handlers[type(event)](event, actions)
        if type(event) is not Submitted:  # which changes nothing of this, and is what there is most of
            self._balance(actions)
            self._forget(actions)
        return actions

    def _submitted(self, event: Submitted, actions: list[Action]) -> None:
        if event.function != self._end:
            raise InvalidArgumentError(f"function {event.function} was submitted, but {self._end} is the next number.")
        self._end += 1
        self._lost.limit(event.function, event.max_attempts)
        self._dispatch(actions)

    def _worker_joined(self, event: WorkerJoined, actions: list[Action]) -> None:
        if event.incarnation in self._seen:
            return
        before = self._processes.get(event.worker)
        if before is not None:  # it died unnoticed
            self._lose(before, "it was started again", actions)
        if event.readmit:
            self._removed.discard(event.worker)
        if event.worker not in self._removed:
            self._seen.add(event.incarnation)
            process = self._processes[event.worker] = Process(event.worker, event.incarnation)
            self._settle(process)
        self._dispatch(actions)

    def _worker_lost(self, event: WorkerLost, actions: list[Action]) -> None:
        self._seen.add(event.incarnation)  # it must not join later: it may have been lost on its way in
        process = self._process_of(event)
        if process is not None:
            self._lose(process, event.reason, actions)
            self._dispatch(actions)

    def _worker_draining(self, event: WorkerDraining, actions: list[Action]) -> None:
        self._removed.add(event.worker)
        process = self._processes.get(event.worker)
        if process is not None and not process.draining:
            process.draining = True
            self._settle(process)
            self._recall_all(process, actions)
            self._release_if_empty(process, actions)

    def _worker_leaves(self, event: WorkerLeaves, actions: list[Action]) -> None:
        process = self._process_of(event)
        if process is not None:
            process.leaving = True
            self._settle(process)

    def _finished(self, event: Finished, actions: list[Action]) -> None:
        process = self._process_of(event)
        functions = self._take(process, event.functions)
        if process is None or not functions:
            return
        self._durations.learn(event.seconds, len(event.functions))
        self._has_reported(process)
        self._lost.forget(functions)
        actions.append(Complete(functions))
        self._dispatch(actions, busy=process)
        self._release_if_empty(process, actions)

    def _failed(self, event: Failed, actions: list[Action]) -> None:
        process = self._process_of(event)
        if process is None or not self._take(process, (event.function,)):
            return
        self._has_reported(process)
        self._lost.forget((event.function,))
        if self._loss is not None and self._was_caused_by_loss(event):
            actions.append(Cancel(event.function, self._loss))
        else:
            self._fail(event.function, event.error, process, actions)
        self._dispatch(actions, busy=process)
        self._release_if_empty(process, actions)

    def _handed_back(self, event: HandedBack, actions: list[Action]) -> None:
        process = self._process_of(event)
        functions = self._take(process, event.functions)
        if process is None or not functions:
            return
        process.asked = False
        self._settle(process)
        self._send_again(functions, actions)
        self._dispatch(actions)
        self._release_if_empty(process, actions)

    def _moment_passed(self, event: MomentPassed, actions: list[Action]) -> None:
        self._awaits_moment = False
        for process in self._processes.values():
            if not process.reported and process.count > 1:
                process.stalled = True
                self._stalled[process] = None
                self._settle(process)
            process.reported = False

    def _servers_were_lost(self, event: ServersLost, actions: list[Action]) -> None:
        if not self._servers_lost:
            for process in self._processes.values():
                self._recall_all(process, actions)
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
        lost = self._again + [function for _, function in self._later]
        actions.extend(Cancel(function, error) for function in sorted(lost + self._back))
        actions.extend(Cancel(function, error) for function in range(self._next, self._end))
        self._lost.forget((*lost, *self._back, *range(self._next, self._end)))
        self._again.clear()
        self._later.clear()
        self._back.clear()
        self._next = self._taken_below = self._end
        self._taken_error = error
        if self._server_error is not None:
            self._loss_below = self._end
        self._server_error = self._function_error = None

    def _dispatch_held(self, event: DispatchHeld, actions: list[Action]) -> None:
        self._held = True
        for process in self._processes.values():
            self._recall_all(process, actions)
        self._dispatch(actions)  # what was lost twice waited for others to begin; now they do not

    def _dispatch_released(self, event: DispatchReleased, actions: list[Action]) -> None:
        self._held = False
        self._dispatch(actions)

    # ---- what is sent ------------------------------------------------------------------------------------------------

    def _dispatch(self, actions: list[Action], busy: Process | None = None) -> None:
        """Send out what can be sent. ``busy`` has just finished a function."""
        if self._servers_lost or self._server_error is not None or self._function_error is not None:
            return
        while (process := self._next_free()) is not None and (waiting := self._sendable()):
            is_repeated = bool(self._again) or self._later_may_go()
            if is_repeated and process.batches:
                return  # the next one that has nothing takes it, before everything else
            functions = (self._pop_lost(),) if is_repeated else self._pop(self._size_of_batch(waiting))
            rested = not process.batches and process is not busy
            if not process.batches:
                self._busy += 1
                process.reported = True
            batch = Batch(process, functions)
            process.batches.append(batch)
            process.alone = is_repeated
            self._running.update(dict.fromkeys(functions, batch))
            self._settle(process)
            actions.append(Dispatch(functions, process.worker, process.incarnation, rested, is_repeated))

    def _sendable(self) -> int:
        """How many functions wait and may go."""
        lost = len(self._again) + (len(self._later) if self._later_may_go() else 0)
        return lost if self._held else lost + len(self._back) + self._end - self._next

    def _later_may_go(self) -> bool:
        if self._held or not self._later:
            return bool(self._later)
        has_all_begun = len(self._running) == self._busy  # what is at a worker behind another one has not
        return has_all_begun and not self._back and self._next >= self._later[0][0]

    def _pop_lost(self) -> int:
        return heappop(self._again) if self._again else self._later.popleft()[1]

    def _next_free(self) -> Process | None:
        for level in self._free:
            if level:
                return next(iter(level))
        return None

    def _size_of_batch(self, waiting: int) -> int:
        share = waiting // max(_FEWEST_SHARES, self._room * len(self._processes))
        return self._durations.size_of_batch(min(LARGEST_BATCH, share))

    def _pop(self, count: int) -> tuple[int, ...]:
        """The next functions that were not lost, at most ``count``; at least one waits."""
        if not self._back:
            first, self._next = self._next, min(self._next + count, self._end)
            return tuple(range(first, self._next))
        functions: list[int] = []
        while len(functions) < count:
            if self._back:
                functions.append(heappop(self._back))
            elif self._next < self._end:
                functions.append(self._next)
                self._next += 1
            else:
                break
        return tuple(functions)

    def _balance(self, actions: list[Action]) -> None:
        """While a worker idles and nothing waits, take from those that are stalled."""
        if len(self._running) == self._busy or not self._free[0] or self._sendable():
            return
        if self._servers_lost or self.pending_error is not None:
            return
        for process in self._stalled:
            count = process.count
            if count > 1 and not process.asked:
                process.asked = True
                later_half = tuple(process.functions[count - count // 2 :])
                actions.append(Recall(later_half, process.worker, process.incarnation))
        if not self._awaits_moment:
            self._awaits_moment = True
            actions.append(AwaitMoment())

    def _recall_all(self, process: Process, actions: list[Action]) -> None:
        if process.count > 1:  # one alone has been begun, or is about to be
            actions.append(Recall(tuple(process.functions), process.worker, process.incarnation))

    # ---- the parts of events -----------------------------------------------------------------------------------------

    def _process_of(self, event: WorkerLost | WorkerLeaves | Finished | Failed | HandedBack) -> Process | None:
        """Where news come from; None if they are out of date."""
        process = self._processes.get(event.worker)
        return process if process is not None and process.incarnation == event.incarnation else None

    def _take(self, process: Process | None, functions: Iterable[int]) -> tuple[int, ...]:
        """Take functions off a process; returns those that were in flight there. `_settle` comes next."""
        if process is None:
            return ()
        running, taken = self._running, []
        for function in functions:
            batch = running.get(function)
            if batch is not None and batch.process is process:
                del running[function], batch.functions[function]
                taken.append(function)
        if taken and not all(batch.functions for batch in process.batches):
            process.batches = [batch for batch in process.batches if batch.functions]
            if not process.batches:
                process.alone = False
                self._busy -= 1
                self._is_not_stalled(process)
        return tuple(taken)

    def _has_reported(self, process: Process) -> None:
        process.reported = True
        self._is_not_stalled(process)
        self._settle(process)

    def _is_not_stalled(self, process: Process) -> None:
        process.stalled = process.asked = False
        self._stalled.pop(process, None)

    def _settle(self, process: Process) -> None:
        """Put it where it belongs among those that take functions."""
        has_room = takes_functions(process) and not process.alone and len(process.batches) < self._room
        level = len(process.batches) if has_room else None
        if level != process.level:
            if process.level is not None:
                del self._free[process.level][process]
            if level is not None:
                self._free[level][process] = None
            process.level = level

    def _lose(self, process: Process, reason: str, actions: list[Action]) -> None:
        del self._processes[process.worker]
        lost = self._take(process, process.functions)
        process.leaving = True
        self._settle(process)
        for function in lost:
            self._lost.add(function, f"worker {process.worker}: {reason.rstrip('.')}")
        # Beside others it need not have been this one.
        if len(lost) == 1 and self._lost.is_used_up(lost[0]) and not self._was_taken(lost[0]):
            losses = self._lost.losses(lost[0])
            self._lost.forget(lost)
            self._fail(lost[0], FunctionSetAsideError(lost[0], losses), None, actions)
        else:
            self._send_again(lost, actions)
        if process.draining:
            actions.append(Release(process.worker, process.incarnation))

    def _release_if_empty(self, process: Process, actions: list[Action]) -> None:
        if process.draining and not process.batches:
            del self._processes[process.worker]
            actions.append(Release(process.worker, process.incarnation))

    def _send_again(self, functions: Iterable[int], actions: list[Action]) -> None:
        for function in sorted(functions):
            if self._was_taken(function):
                assert self._taken_error is not None
                self._lost.forget((function,))
                actions.append(Cancel(function, self._taken_error))
            else:
                losses = self._lost.times(function)
                if losses > 1:
                    self._later.append((self._end, function))
                else:
                    heappush(self._again if losses else self._back, function)

    def _was_taken(self, function: int) -> bool:
        """Whether it was submitted before the user took an error: it never runs a second time."""
        return self._taken_error is not None and function < self._taken_below

    def _fail(self, function: int, error: BaseException, at: Process | None, actions: list[Action]) -> None:
        actions.append(Fail(function, error))
        if self._function_error is None and function >= self._taken_below:
            self._function_error = error
            for process in self._processes.values():
                if process is not at:  # it hands back what it has by itself
                    self._recall_all(process, actions)

    def _was_caused_by_loss(self, event: Failed) -> bool:
        in_flight_then = self._server_error is not None or event.function < self._loss_below
        return in_flight_then and isinstance(event.error, CommunicationError)

    def _forget(self, actions: list[Action]) -> None:
        oldest = min((function for _, function in self._later), default=self._next)
        for waiting in (self._again, self._back):
            if waiting and waiting[0] < oldest:
                oldest = waiting[0]
        while self._low < oldest and self._low not in self._running:
            self._low += 1
        if self._low - self._forgotten >= self._forget_every:
            self._forgotten = self._low
            actions.append(Forget(self._low))
