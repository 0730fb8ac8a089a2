"""The thin shell around the scheduler: one thread that feeds it events and carries its actions out."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torchstrat.cluster_spec import PARAMETER_SERVER
from torchstrat.errors import (
    CancelledByServerLossError,
    CancelledError,
    CommunicationError,
    CommunicationTimeoutError,
    ContextError,
    ParameterServerUnavailable,
    TorchstratError,
)
from torchstrat.parameter_server.dispatch import (
    KEPT_CODES,
    Dispatch,
    Modes,
    NotRun,
    Options,
    Raised,
    Recent,
    Returned,
    ServerGone,
)
from torchstrat.parameter_server.job import Job
from torchstrat.parameter_server.leases.lease import Lease
from torchstrat.parameter_server.per_worker import ResourceTable
from torchstrat.parameter_server.remote_value import RemoteValue
from torchstrat.parameter_server.scheduler import Scheduler
from torchstrat.parameter_server.scheduler_events import (
    Action,
    Cancel,
    Complete,
    DispatchHeld,
    DispatchReleased,
    ErrorTaken,
    Event,
    Fail,
    Failed,
    Finished,
    Forget,
    HandedBack,
    Release,
    ServersLost,
    ServersRestored,
    Submitted,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from torchstrat.parameter_server.scheduler_events import Dispatch as Send
from torchstrat.parameter_server.tasks import Peer, Task
from torchstrat.parameter_server.travel.closures import Packed

logger = logging.getLogger("torchstrat.parameter_server")

_UNLIMITED_SECONDS = math.inf  # functions take as long as they take; a worker that is gone ends the call


@dataclass(frozen=True)
class Work:
    """One scheduled function, as it will be sent."""

    code: bytes
    packed_code: Packed
    arguments: Packed
    options: Options
    modes: Modes
    seed: int
    value: RemoteValue
    leases: tuple[Lease, ...] = ()


@dataclass
class _KnownWorker:
    """What one incarnation of a worker has been sent."""

    peer: Peer
    codes: Recent = field(default_factory=lambda: Recent(KEPT_CODES))
    version: int = 0
    resources: set[int] = field(default_factory=set)
    options: Options | None = None
    modes: Modes | None = None
    servers: Mapping[int, Peer] | None = None


class Dispatcher:
    """Queues functions, runs them on workers, keeps results and errors. Thread-safe.

    ``unpack`` opens what a worker returned.
    """

    def __init__(
        self, job: Job, resources: ResourceTable, unpack: Callable[[Any], Any], *, queue_size: int, name: str
    ) -> None:
        self._job = job
        self._resources = resources
        self._unpack = unpack
        self.queue_size = queue_size
        self._scheduler = Scheduler(first_function=job.first_function)
        self._next_function = job.first_function
        self._works: dict[int, Work] = {}
        self._results: dict[tuple[int, str], Any] = {}  # of (function, incarnation), on their way to the scheduler
        self._finished: Any = None  # the result of the function whose end is being handled
        self._places: dict[int, int] = {}
        self._workers: dict[str, _KnownWorker] = {}
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._changed = threading.Condition(threading.RLock())
        self._pauses = 0
        self._loss: ParameterServerUnavailable | None = None  # the last one
        self._broken: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    # -- for the user's thread --------------------------------------------------------------------------------------

    def submit(self, make: Callable[[int], Work]) -> RemoteValue:
        """Queue ``make(number)``; waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished < self.queue_size or self._is_stuck())
            self._require_running()
            if self._scheduler.pending_error is None and not self._scheduler.servers_lost:
                work = make(self._next_function)
                self._works[self._next_function] = work
                self._put_now(Submitted(self._next_function))
                self._next_function += 1
                return work.value
        self.raise_pending()
        assert self._loss is not None
        raise ParameterServerUnavailable(f"{self._loss} Until then nothing can be scheduled.", self._loss.task)

    @property
    def _unfinished(self) -> int:
        return len(self._works)

    def _is_stuck(self) -> bool:
        """Whether waiting for functions to end is in vain: they wait for the user to take an error."""
        return self._broken is not None or self._closed or self._is_quiet()

    def _is_quiet(self) -> bool:
        return self._scheduler.pending_error is not None and self._scheduler.in_flight == 0

    @property
    def next_function(self) -> int:
        """The number that the next function will have."""
        return self._next_function

    @property
    def ended_functions(self) -> int:
        """How many have ended, those of an earlier coordinator of the same servers included."""
        with self._changed:
            return self._next_function - self._unfinished

    @property
    def is_idle(self) -> bool:
        """Whether no function runs, nor will any that is queued: the user has an error to take first."""
        with self._changed:
            return self._unfinished == 0 or self._is_quiet()

    @property
    def is_done(self) -> bool:
        with self._changed:
            return self._unfinished == 0

    def wait(self, timeout_seconds: float | None) -> None:
        """Until everything has run, or an error is there to be taken and nothing runs any more."""
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self._unfinished == 0 or self._is_quiet() or self._broken is not None, timeout_seconds
            )
            if not ended:
                raise CommunicationTimeoutError(self._waiting_for(timeout_seconds))

    def raise_pending(self) -> None:
        """Raise the pending error once, and cancel what is queued. Waits for what still runs."""
        with self._changed:
            self._require_running()
            if self._scheduler.pending_error is None:
                return
            self._changed.wait_for(lambda: self._is_quiet() or self._broken is not None)
            self._require_running()
            error = self._scheduler.pending_error
            if error is None:
                return
            self._put_now(ErrorTaken())
        raise error

    def _is_running(self) -> bool:
        return self._broken is None and not self._closed

    def _require_running(self) -> None:
        if self._broken is not None:
            raise TorchstratError(
                "the coordinator's scheduler has failed; this is a bug of torchstrat."
            ) from self._broken
        if self._closed:
            raise ContextError("this coordinator's strategy was closed.")

    def where(self, function: int) -> str:
        """For messages: what a function waits for."""
        with self._changed:
            worker = self._places.get(function)
            if worker is not None:
                return f"it runs on worker {worker}"
            if not self._workers:
                return "it waits for a worker, and none has joined"
            return f"it waits for one of workers {sorted(w.peer.task.index for w in self._workers.values())}"

    def _waiting_for(self, seconds: float | None, who: str = "join") -> str:
        running = [f"function {function} on worker {worker}" for function, worker in sorted(self._places.items())]
        queued = self._unfinished - len(running)
        present = sorted(known.peer.task.index for known in self._workers.values())
        return (
            f"{who} waited {seconds} s: {', '.join(running) if running else 'nothing'} is running, {queued} functions "
            f"are queued, workers {present} are there. Give it more time, or look at those workers."
        )

    @contextlib.contextmanager
    def paused(self, timeout_seconds: float, who: str) -> Iterator[None]:
        """A block in which no function is half-way: each has changed all that it changes, on all servers, or nothing.

        Waits for those that run; none begins meanwhile, they stay queued, and `submit` goes on. ``who`` waits, for the
        error. Raises `CommunicationTimeoutError` naming functions and workers, and `ParameterServerUnavailable`.
        """
        with self._changed:
            self._require_running()
            self._pauses += 1
            if self._pauses == 1:
                self._put_now(DispatchHeld())
            try:
                rests = self._changed.wait_for(
                    lambda: self._scheduler.at_rest or self._scheduler.servers_lost or not self._is_running(),
                    timeout_seconds,
                )
                self._require_running()
                if not rests:
                    raise CommunicationTimeoutError(self._waiting_for(timeout_seconds, who))
                if self._scheduler.servers_lost:
                    assert self._loss is not None
                    raise ParameterServerUnavailable(str(self._loss), self._loss.task)
            except BaseException:
                self._release()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._release()

    def _release(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and self._broken is None:
            self._put_now(DispatchReleased())

    def drain(self, worker: int) -> None:
        self.put(WorkerDraining(worker))

    def wait_released(self, worker: int, timeout_seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: all(known.peer.task.index != worker for known in self._workers.values()), timeout_seconds
            )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    # -- events -----------------------------------------------------------------------------------------------------

    def put(self, event: Event) -> None:
        """Tell the scheduler, from any thread."""
        self._events.put(event)

    def worker_joined(self, peer: Peer) -> None:
        with self._changed:
            for known in list(self._workers.values()):
                if known.peer.task == peer.task:
                    del self._workers[known.peer.incarnation]
            self._workers[peer.incarnation] = _KnownWorker(peer)
        self.put(WorkerJoined(peer.task.index, peer.incarnation))

    def worker_lost(self, peer: Peer, reason: str) -> None:
        logger.warning("%s was lost: %s; what it was running runs elsewhere.", peer, reason)
        self._job.fence(peer)
        self.put(WorkerLost(peer.task.index, peer.incarnation))

    def worker_leaves(self, peer: Peer) -> int:
        """It says that it will end. Returns how many of its functions have not been answered yet."""
        self.put(HandedBack(peer.task.index, peer.incarnation, None))
        with self._changed:
            return len(self._scheduler.functions_at(peer.task.index))

    def servers_lost(self, error: ParameterServerUnavailable) -> None:
        self._loss = error
        self.put(ServersLost(error))

    @property
    def loss(self) -> ParameterServerUnavailable | None:
        """Of servers that have not been restored since, or not been raised yet; None: there is none."""
        with self._changed:
            error = self._scheduler.pending_error
            if isinstance(error, ParameterServerUnavailable):
                return error
            return self._loss if self._scheduler.servers_lost else None

    def cancel_because_of(self, loss: ParameterServerUnavailable) -> int:
        """Nothing more runs until all servers are restored, and what is queued never does; who waits for it is told.

        Returns how many functions had not ended. Those that run are waited for by `wait`.
        """
        with self._changed:
            if not self._scheduler.servers_lost:  # a call was the first to notice
                self._loss = loss
                self._put_now(ServersLost(loss))
            unfinished = self._unfinished
            self._put_now(ErrorTaken())
            return unfinished

    def servers_restored(self) -> None:
        """All servers have what the program wants: functions may run. Raises `ParameterServerUnavailable` if one of
        them was lost meanwhile."""
        with self._changed:
            # A server is noted as lost before the scheduler hears of it: what is not seen here is an event to come.
            for index in self._job.lost_servers():
                raise ParameterServerUnavailable(
                    f"parameter server {index} was lost again while the servers were restored; restore the checkpoint "
                    "once more.",
                    Task(PARAMETER_SERVER, index),
                )
            if isinstance(self._scheduler.pending_error, ParameterServerUnavailable):
                self._put_now(ErrorTaken())  # who restores knows of the loss
            self._put_now(ServersRestored())

    def _put_now(self, event: Event) -> None:
        """For callers that hold the lock and go on from the result."""
        self._carry_out(self._scheduler.handle(event))
        self._changed.notify_all()

    def _loop(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                with self._changed:
                    self._before(event)
                    self._carry_out(self._scheduler.handle(event))
                    self._after(event)
                    self._changed.notify_all()
            except BaseException as error:
                with self._changed:
                    self._broken = error
                    for work in self._works.values():
                        work.value._set_error(error)
                    self._changed.notify_all()
                return

    def _before(self, event: Event) -> None:
        if isinstance(event, WorkerLost):
            self._workers.pop(event.incarnation, None)
            for index, worker in list(self._places.items()):
                if worker == event.worker:
                    self._places.pop(index)
        elif isinstance(event, Finished):
            self._finished = self._results.pop((event.function, event.incarnation))

    def _after(self, event: Event) -> None:
        if isinstance(event, Finished):
            self._finished = None
        elif isinstance(event, ServersLost | WorkerLost | HandedBack) and self._scheduler.servers_lost:
            self._tell_who_waits_in_vain()

    def _tell_who_waits_in_vain(self) -> None:
        """What is queued when a server is lost never runs: it is cancelled when the user takes the error. Who waits for
        such a result, and may never call anything else, is told now."""
        error = self._scheduler.pending_error
        if not isinstance(error, ParameterServerUnavailable):
            return
        for function, work in self._works.items():
            if self._scheduler.worker_of(function) is None:
                work.value._set_error(_cancelled(Cancel(function, error)))

    # -- actions ----------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Complete):
                self._end(action.function, returned=True)._set_result(self._finished)
            elif isinstance(action, Fail):
                self._end(action.function)._set_error(action.error)
            elif isinstance(action, Cancel):
                self._end(action.function)._set_error(_cancelled(action))
            elif isinstance(action, Release):
                self._workers.pop(action.incarnation, None)
            elif isinstance(action, Forget):
                self._forget(action.below)

    def _end(self, function: int, *, returned: bool = False) -> RemoteValue:
        self._places.pop(function, None)
        work = self._works.pop(function)
        for lease in work.leases:  # before anybody can see the outcome
            lease._ended(returned=returned)
        return work.value

    def _send(self, action: Send) -> None:
        known = self._workers.get(action.incarnation)
        if known is None:  # lost; the event that says so is on its way
            return
        work = self._works[action.function]
        self._places[action.function] = action.worker
        for lease in work.leases:
            lease._was_sent()
        message = self._message(action, work, known)
        future = self._job.endpoint.call(known.peer, "worker.run", message, timeout_seconds=_UNLIMITED_SECONDS)
        future.add_done_callback(lambda done: self._answered(action, known.peer, done))

    def _message(self, action: Send, work: Work, known: _KnownWorker) -> Dispatch:
        new_code = work.code not in known.codes
        known.codes.add(work.code)
        catalog = self._job.catalog
        # Only what `schedule` has made ready: the user's thread may be half-way through building the next model.
        increments = tuple(catalog.increments(known.version, new=False))
        if increments:
            known.version = increments[-1].number
            catalog.trim(min(worker.version for worker in self._workers.values()))
        tokens = work.packed_code.tokens | work.arguments.tokens
        needed = self._resources.needed_for({token[1] for token in tokens if token[0] == "per_worker"})
        resources = tuple(spec for spec in needed if spec.number not in known.resources)
        known.resources.update(spec.number for spec in resources)
        options = None if known.options == work.options else work.options
        known.options = work.options
        modes = None if known.modes == work.modes else work.modes
        known.modes = work.modes
        peers = self._job.server_peers()
        servers = None if known.servers == peers else peers
        known.servers = peers
        return Dispatch(
            action.function,
            work.code,
            work.packed_code if new_code else None,
            work.arguments,
            increments,
            resources,
            options,
            servers,
            action.rested,
            work.seed,
            modes,
        )

    def _answered(self, action: Send, peer: Peer, done: Future[Any]) -> None:
        """On a thread of the transport: only note what came."""
        if self._closed:
            return
        worker, incarnation, function = action.worker, action.incarnation, action.function
        error = done.exception()
        if isinstance(error, CommunicationError):
            # Usually the membership knows by now. A process that lives and cannot be talked to must start afresh.
            self._job.membership.give_up(peer, f"its answer did not come: {error}")
            self.put(WorkerLost(worker, incarnation))
            return
        outcome = Raised(error) if error is not None else done.result()
        if isinstance(outcome, Returned):
            try:
                self._results[function, incarnation] = self._unpack(outcome.result)
            except Exception as problem:
                self.put(Failed(worker, incarnation, function, problem))
            else:
                self.put(Finished(worker, incarnation, function))
        elif isinstance(outcome, Raised):
            self.put(Failed(worker, incarnation, function, outcome.error))
        elif isinstance(outcome, NotRun):
            self.put(HandedBack(worker, incarnation, function))
        elif isinstance(outcome, ServerGone):
            self._server_gone(action, outcome)

    def _server_gone(self, action: Send, outcome: ServerGone) -> None:
        self._job.report_server_gone(outcome.index, outcome.peer, outcome.reason)
        error = ParameterServerUnavailable(outcome.reason, Task(PARAMETER_SERVER, outcome.index))
        self.put(Failed(action.worker, action.incarnation, action.function, error))

    def _forget(self, below: int) -> None:
        for index in self._job.server_peers():
            self._job.servers.send(index, "ps.forget_below", below)


def _cancelled(action: Cancel) -> BaseException:
    if isinstance(action.because, ParameterServerUnavailable):
        error: BaseException = CancelledByServerLossError(
            f"function {action.function} was cancelled: {action.because}", action.because.task
        )
    else:
        error = CancelledError(
            f"function {action.function} was cancelled before it ran, because of an earlier error: {action.because}"
        )
    error.__cause__ = action.because
    return error
