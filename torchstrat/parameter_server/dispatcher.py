"""The thin shell around the scheduler: it brings events to it and carries its actions out.

Who has news takes the lock and handles them: the user's threads their submissions, the transport's threads the answers
that they bring, so that none is handed from thread to thread. News from elsewhere, and moments to await, are for the
dispatcher's own thread. Nothing is sent, and nobody else's code is called, with the lock held: what is to be sent waits
in an outbox, which each of them empties after it has let go of the lock. Batches may therefore leave in another order
than they were made in; workers bring them into their order by their numbers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torchstrat.core.errors import (
    CommunicationTimeoutError,
    ContextError,
    FunctionSetAsideError,
    ParameterServerUnavailable,
    TorchstratError,
)
from torchstrat.distributed.cluster import PARAMETER_SERVER
from torchstrat.parameter_server import scheduler_events as ev
from torchstrat.parameter_server.interface import Peer, Task
from torchstrat.parameter_server.job import Job
from torchstrat.parameter_server.remote_value import RemoteValue, ResourceTable, numbers_of
from torchstrat.parameter_server.scheduler import Scheduler
from torchstrat.parameter_server.waiting import TimeLimits, held_back, waiting_for, where
from torchstrat.parameter_server.worker_sessions import GradientsOfJob, KnownWorker, News, Work, WorkerCalls

logger = logging.getLogger("torchstrat.parameter_server")

_MOMENT_SECONDS = 0.005


class Dispatcher:
    """Queues functions, runs them on workers, keeps results and errors. Thread-safe.

    ``unpack`` opens what a worker returned.
    """

    def __init__(
        self, job: Job, resources: ResourceTable, unpack: Callable[[Any], object], *, queue_size: int, name: str
    ) -> None:
        self._job, self._resources, self.queue_size = job, resources, queue_size
        self._worker_calls = WorkerCalls(job, unpack, self._is_over, self._take)
        self._scheduler = Scheduler(first_function=job.first_function)
        self.next_function = job.first_function
        """The number that the next function will have."""
        self._works: dict[int, Work] = {}
        self._results: News | None = None  # whose events are being handled
        self._workers: dict[str, KnownWorker] = {}
        self.readmitted: set[int] = set()  # whoever joins as one of these is used, also where it was removed before
        self._is_shared = False  # there are several, or were
        self._accumulates = False  # functions have left gradients to servers
        self._lost_gradients: dict[int, KnownWorker] = {}  # by parameter, and on whom they were
        self._gradients = GradientsOfJob()
        self.wrote_parameters = False  # whether functions have, by hand, as far as workers' reports are here
        self._has_released = False  # something that not all workers have been told of
        self._timed = 0  # functions without an outcome that have a limit of time
        self._limits = TimeLimits()
        self._inbox: deque[ev.Event | News] = deque()
        self._outbox: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._awaited: list[Callable[[], bool]] = []  # what somebody waits for
        self._pauses: set[object] = set()
        self._loss: ParameterServerUnavailable | None = None  # the last one
        self._broken: BaseException | None = None
        self._closed, self._moment_due = False, math.inf
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # for the thread: to look, and whether to go on
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()
        job.on_outcomes = self._worker_calls.reported
        job.left_gradients = self._left_gradients
        job.lifetimes.watch(lambda: self.next_function, lambda: self._calls.put(True))

    # -- for the user's thread --------------------------------------------------------------------------------------

    def submit(self, make: Callable[[int], Work]) -> RemoteValue[Any]:
        """Queue ``make(number)``; waits while the queue is full."""
        while True:
            with self._lock:
                if len(self._works) >= self.queue_size:
                    self._wait_for(lambda: self.num_unfinished < self.queue_size or self._is_stuck())
                if self._closed or self._broken is not None:
                    self._require_running()
                may_run = self._scheduler.pending_error is None and not self._scheduler.servers_lost
                if may_run:
                    number = self.next_function
                    work = self._works[number] = make(number)
                    self.next_function += 1
                    # Nobody waits for anything that this changes.
                    actions = self._scheduler.handle(ev.Submitted(number, work.max_attempts))
                    if actions:
                        self._carry_out(actions)
                    if work.timeout_seconds is not None:
                        self._timed += 1
                        self._look_at_time()
            if may_run:
                if self._outbox:
                    self._empty_outbox()
                return work.value
            self.raise_pending()
            if (lost := self.loss) is not None:  # otherwise another thread has taken the error
                raise ParameterServerUnavailable(f"{lost} Until then nothing can be scheduled.", lost.task)

    @property
    def num_unfinished(self) -> int:
        """How many of those that were scheduled have not ended."""
        return len(self._works)

    def _is_stuck(self) -> bool:
        """Whether waiting for functions to end is in vain: they wait for the user to take an error, or it is over."""
        return not self._is_running() or self._is_quiet()

    def _is_quiet(self) -> bool:
        return self._scheduler.pending_error is not None and self._scheduler.in_flight == 0

    @property
    def ended_functions(self) -> int:
        """How many have ended, those of an earlier coordinator of the same servers included."""
        with self._lock:
            return self.next_function - self.num_unfinished

    @property
    def is_idle(self) -> bool:
        """Whether no function runs, nor will any that is queued: the user has an error to take first."""
        with self._lock:
            return self.num_unfinished == 0 or self._is_quiet()

    @property
    def is_done(self) -> bool:
        with self._lock:
            return self.num_unfinished == 0

    def wait(self, timeout_seconds: float | None) -> None:
        """Until everything has run, or an error is there to be taken and nothing runs any more."""
        with self._lock:
            if not self._wait_for(lambda: self.num_unfinished == 0 or self._is_stuck(), timeout_seconds):
                raise CommunicationTimeoutError(self._waiting_for(timeout_seconds))

    def raise_pending(self) -> None:
        """Raise the pending error once, and cancel what is queued. Waits for what still runs."""
        if self._lost_gradients and self._is_running():
            self._raise_lost_gradients()
        if self._is_running() and self._scheduler.pending_error is None:
            return  # without the lock: an error that comes now might as well have come after this
        with held_back, self._lock:
            self._require_running()
            if self._scheduler.pending_error is None:
                return
            self._wait_for(self._is_stuck)
            self._require_running()
            error = self._scheduler.pending_error
            if error is None:
                return
            self._handle(ev.ErrorTaken())
        self._empty_outbox()
        raise error

    def _is_running(self) -> bool:
        return self._broken is None and not self._closed

    def _require_running(self) -> None:
        if self._broken is not None:
            raise TorchstratError(
                "the coordinator's scheduler has failed; this is a bug of torchstrat."
            ) from self._broken
        if self._closed:
            raise _closed("this")

    def where(self, function: int) -> str:
        """For messages: what a function waits for."""
        with self._lock:
            return where(self._scheduler, self._present, function)

    @property
    def _present(self) -> list[int]:
        return sorted(known.peer.task.index for known in self._workers.values())

    def _waiting_for(self, seconds: float | None, who: str = "join") -> str:
        return waiting_for(self._scheduler, self._present, seconds, who)

    @contextlib.contextmanager
    def paused(self, timeout_seconds: float, who: str) -> Iterator[None]:
        """A block in which no function is half-way: each has changed all that it changes, on all servers, or nothing.

        Waits for those that run; none begins meanwhile, they stay queued, and `submit` goes on. ``who`` waits, for the
        error. Raises `CommunicationTimeoutError` naming functions and workers, and `ParameterServerUnavailable`.
        """
        pause = object()
        try:
            with held_back, self._lock:
                self._require_running()
                self._pauses.add(pause)
                if len(self._pauses) == 1:
                    self._handle(ev.DispatchHeld())
            self._empty_outbox()
            self._wait_for_rest(timeout_seconds, who)
            yield
        finally:
            with held_back, self._lock:
                if pause in self._pauses:  # else it was refused, or interrupted, before it began
                    self._pauses.remove(pause)
                    if not self._pauses and self._broken is None:
                        self._handle(ev.DispatchReleased())
            self._empty_outbox()

    def _wait_for_rest(self, timeout_seconds: float, who: str) -> None:
        with self._lock:
            rests = self._wait_for(
                lambda: self._scheduler.at_rest or self._scheduler.servers_lost or not self._is_running(),
                timeout_seconds,
            )
            self._require_running()
            if not rests:
                raise CommunicationTimeoutError(self._waiting_for(timeout_seconds, who))
            if self._scheduler.servers_lost:
                self.require_servers()

    def require_servers(self) -> None:
        """Raises `ParameterServerUnavailable` where one is lost and was not restored since."""
        if (lost := self.loss) is not None:
            raise ParameterServerUnavailable(str(lost), lost.task)

    @contextlib.contextmanager
    def unfinished(self) -> Iterator[Mapping[int, Work]]:
        """The functions that have no outcome yet; in the block none gets one, and none is added."""
        with self._lock:
            yield self._works

    def drain(self, worker: int) -> None:
        self.readmitted.discard(worker)
        self.put(ev.WorkerDraining(worker))

    def wait_released(self, worker: int, timeout_seconds: float | None) -> bool:
        with self._lock:
            return self._wait_for(
                lambda: self._closed or worker not in [known.peer.task.index for known in self._workers.values()],
                timeout_seconds,
            )

    def close(self) -> None:
        """Who waits for a function, or for all, is told; what runs is not waited for."""
        with self._lock:
            self._closed = self._worker_calls.is_closed = True
            for number, work in self._works.items():
                work.value.set_exception(_closed(f"function {number} ({work.value.name}) had not ended when this"))
            self._changed.notify_all()
        self._calls.put(False)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    # -- events -----------------------------------------------------------------------------------------------------

    def put(self, event: ev.Event) -> None:
        """Tell the scheduler, from any thread; it is handled on the dispatcher's."""
        self._inbox.append(event)
        self._calls.put(True)

    def worker_joined(self, peer: Peer) -> None:
        with self._lock:
            if peer.incarnation in self._workers:
                return
            for known in list(self._workers.values()):
                if known.peer.task == peer.task:
                    self._forget_worker(known.peer.incarnation)
            self._workers[peer.incarnation] = KnownWorker(peer)
            self._is_shared |= len(self._workers) > 1
        logger.debug("%s has joined.", peer)
        self._take(ev.WorkerJoined(peer.task.index, peer.incarnation, readmit=peer.task.index in self.readmitted))

    def worker_lost(self, peer: Peer, reason: str) -> None:
        logger.warning("%s was lost: %s; what it was running runs elsewhere.", peer, reason)
        self._job.fence(peer)
        self.put(ev.WorkerLost(peer.task.index, peer.incarnation, reason))

    def worker_leaves(self, peer: Peer) -> int:
        """It says that it will end. Returns how many of its functions have not been answered yet."""
        self.put(ev.WorkerLeaves(peer.task.index, peer.incarnation))
        with self._lock:
            return len(self._scheduler.functions_at(peer.task.index))

    def servers_lost(self, error: ParameterServerUnavailable) -> None:
        self._loss = error
        self.put(ev.ServersLost(error))

    @property
    def loss(self) -> ParameterServerUnavailable | None:
        """Of servers that have not been restored since, or not been raised yet; None: there is none."""
        with self._lock:
            error = self._scheduler.pending_error
            if isinstance(error, ParameterServerUnavailable):
                return error
            return self._loss if self._scheduler.servers_lost else None

    def cancel_because_of(self, loss: ParameterServerUnavailable) -> int:
        """Nothing more runs until all servers are restored, and what is queued never does; who waits for it is told.

        Returns how many functions had not ended. Those that run are waited for by `wait`.
        """
        with self._lock:
            if not self._scheduler.servers_lost:  # a call was the first to notice
                self._loss = loss
                self._handle(ev.ServersLost(loss))
            unfinished = self.num_unfinished
            self._handle(ev.ErrorTaken())
        self._empty_outbox()
        return unfinished

    def servers_restored(self) -> None:
        """All servers have what the program wants: functions may run. Raises `ParameterServerUnavailable` if one of
        them was lost meanwhile."""
        with self._lock:
            # A server is noted as lost before the scheduler hears of it: what is not seen here is an event to come.
            for index in self._job.lost_servers():
                raise ParameterServerUnavailable(
                    f"parameter server {index} was lost again while the servers were restored; restore once more.",
                    Task(PARAMETER_SERVER, index),
                )
            if isinstance(self._scheduler.pending_error, ParameterServerUnavailable):
                self._handle(ev.ErrorTaken())  # who restores knows of the loss
            self._handle(ev.ServersRestored())
        self._empty_outbox()

    def _wait_for(self, condition: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        """With the lock. Who handles an event looks whether the condition holds now, so that nobody wakes in vain."""
        self._awaited.append(condition)
        try:
            with held_back.let_through():
                return self._changed.wait_for(condition, timeout_seconds)
        finally:
            self._awaited.remove(condition)

    def _loop(self) -> None:
        while True:
            due = min(self._moment_due, self._limits.due)
            left = None if due == math.inf else max(due - time.monotonic(), 0.0)
            try:
                if not self._calls.get(timeout=left):
                    return
            except queue.Empty:
                if self._moment_due <= time.monotonic():
                    self._moment_due = math.inf
                    self._inbox.append(ev.MomentPassed())
                self._end_what_takes_too_long()
            self.take_in()

    def _look_at_time(self) -> None:
        """With the lock: which functions with a limit run now."""
        first = ((known, self._scheduler.first_at(known.peer.task.index)) for known in self._workers.values())
        running = ((known, function, self._works[function]) for known, function in first if function is not None)
        timed = [
            (known.peer.incarnation, function, work.timeout_seconds)
            for known, function, work in running
            if work.timeout_seconds is not None
        ]
        if self._limits.look(timed):
            self._calls.put(True)

    def _end_what_takes_too_long(self) -> None:
        with self._lock:
            for incarnation, function in self._limits.passed():
                known, work = self._workers.get(incarnation), self._works.get(function)
                if known is not None and work is not None:
                    ran = f"ran for more than {work.timeout_seconds:g} s, its timeout"
                    reason = f"function {function} ({work.value.name}) {ran}"
                    self._outbox.append(partial(self._job.membership.give_up, known.peer, reason))

    def take_in(self) -> None:
        """Handle what has come, on the calling thread, which does not hold the lock."""
        with self._lock:
            try:
                while self._inbox and not self._closed and self._broken is None:
                    news = self._inbox.popleft()
                    if isinstance(news, News):
                        self._handle_news(news)
                    else:
                        self._handle(news)
                self._release_dropped()
            except BaseException as error:
                self._broken = error
                for work in self._works.values():
                    work.value.set_exception(error)
                self._changed.notify_all()
        self._empty_outbox()

    def _empty_outbox(self) -> None:
        """Send what there is to send, whoever has put it there. Without the lock."""
        while self._outbox:
            try:
                send = self._outbox.popleft()
            except IndexError:  # another thread was faster
                return
            send()

    def _handle_news(self, news: News) -> None:
        known = self._workers.get(news.incarnation)
        if known is not None and news.report is not None:
            known.stops, known.left = max(known.stops, news.report.stops), news.report.left
            self.wrote_parameters |= news.report.wrote_parameters
            self._accumulates |= news.report.accumulates
            self._gradients.heard(known, news.report.gradients)
        self._results = news
        for event in news.events:
            self._handle(event)
        self._results = None

    def _handle(self, event: ev.Event) -> None:
        """With the lock; `_empty_outbox` comes after it."""
        self._before(event)
        self._carry_out(self._scheduler.handle(event))
        if self._timed or self._limits.due < math.inf:
            self._look_at_time()
        if self._scheduler.servers_lost and isinstance(event, ev.ServersLost | ev.WorkerLost | ev.HandedBack):
            self._tell_who_waits_in_vain()
        if self._awaited and any(condition() for condition in self._awaited):
            self._changed.notify_all()

    def _release_dropped(self) -> None:
        """Tell servers and workers of what the program has dropped, once no function can name it any more."""
        lifetimes = self._job.lifetimes
        if lifetimes.has_dead and (gone := lifetimes.take_released(self._scheduler.ended_below)):
            self._resources.forget(numbers_of(gone))
            self._gradients.forget(gone)
            self._outbox.append(partial(self._job.release, gone))
            for known in self._workers.values():
                known.release(gone)
            self._has_released = True
        if self._has_released:
            waiting = [known for known in self._workers.values() if known.is_to_be_told]
            for known in waiting:
                if known.telling is None and not self._scheduler.functions_at(known.peer.task.index):
                    self._send_to(known, ())  # else with the next batch
            self._has_released = any(known.is_to_be_told for known in waiting)

    def _before(self, event: ev.Event) -> None:
        if isinstance(event, ev.WorkerLost):
            self._forget_worker(event.incarnation)
        elif isinstance(event, ev.HandedBack):
            for function in event.functions:
                if self._scheduler.is_at(function, event.worker, event.incarnation):
                    for lease in self._works[function].leases:
                        lease.was_handed_back()

    def _tell_who_waits_in_vain(self) -> None:
        """What is queued when a server is lost never runs: it is cancelled when the user takes the error. Who waits for
        such a result, and may never call anything else, is told now."""
        error = self._scheduler.pending_error
        if not isinstance(error, ParameterServerUnavailable):
            return
        for function, work in self._works.items():
            if self._scheduler.worker_of(function) is None:
                work.value.set_exception(ev.Cancel(function, error).error())

    # -- actions ----------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.Complete):
                self._complete(action.functions)
            elif isinstance(action, ev.Dispatch):
                self._send(action)
            elif isinstance(action, ev.Recall):
                self._recall(action)
            elif isinstance(action, ev.Fail):
                value = self._end(action.function)
                if isinstance(action.error, FunctionSetAsideError):
                    action.error.name = value.name
                value.set_exception(action.error)
            elif isinstance(action, ev.Cancel):
                self._end(action.function).set_exception(action.error())
            elif isinstance(action, ev.Release):
                self._forget_worker(action.incarnation)
            elif isinstance(action, ev.Forget):
                self._outbox.append(partial(self._forget, action.below))
            elif isinstance(action, ev.AwaitMoment):
                self._moment_due = time.monotonic() + _MOMENT_SECONDS
                self._calls.put(True)

    def _complete(self, functions: tuple[int, ...]) -> None:
        news = self._results
        assert news is not None
        assert news.report is not None
        finished, results = news.report.finished, news.results
        if functions != finished:  # some were out of date
            by_function = dict(zip(finished, results, strict=True))
            results = [by_function[function] for function in functions]
        works = self._works
        for function, result in zip(functions, results, strict=True):
            work = works.pop(function)
            self._timed -= work.timeout_seconds is not None
            for lease in work.leases:  # before anybody can see the outcome
                lease.ended(returned=True)
            work.value.set_result(result)

    def _end(self, function: int) -> RemoteValue[object]:
        work = self._works.pop(function)
        self._timed -= work.timeout_seconds is not None
        for lease in work.leases:
            lease.ended(returned=False)
        return work.value

    def _send(self, action: ev.Dispatch) -> None:
        known = self._workers.get(action.incarnation)
        if known is None:  # lost; the event that says so is on its way
            return
        for function in action.functions:
            for lease in self._works[function].leases:
                lease.was_sent()
        self._send_to(known, action.functions, rested=action.rested, is_repeated=action.is_repeated)

    def _send_to(
        self, known: KnownWorker, functions: tuple[int, ...], *, rested: bool = False, is_repeated: bool = False
    ) -> None:
        catalog = self._job.catalog
        # Only what `schedule` has made ready: the user's thread may be half-way through building the next model.
        try:
            increments = tuple(catalog.increments(known.version, new=False))
        except Exception as error:  # this worker needs all anew, and the program has put into it what cannot travel
            for function in functions:
                self.put(ev.Failed(known.peer.task.index, known.peer.incarnation, function, error))
            return
        if increments:
            known.version = increments[-1].number
            catalog.trim(min(worker.version for worker in self._workers.values()))
        batch = known.batch(
            self._works,
            functions,
            rested=rested,
            increments=increments,
            resources=self._resources.needed_for,
            servers=self._job.server_peers(),
            is_shared=self._is_shared,
            left_elsewhere=self._left_elsewhere(known),
            accumulates=self._accumulates,
            gradients=self._gradients.news_for(known),
            is_repeated=is_repeated,
        )
        if known.telling is not None:
            known.waiting.append(batch)
            return
        if not functions:
            known.telling = batch.number
        self._outbox.append(partial(self._worker_calls.send_batch, known, batch))

    def _forget(self, below: int) -> None:
        for index in self._job.server_peers():
            self._job.servers.send(index, "ps.forget_below", below)

    def _is_over(self, known: KnownWorker, number: int) -> tuple[int, ...]:
        with self._lock:
            for batch in known.has_been_told(number):
                self._outbox.append(partial(self._worker_calls.send_batch, known, batch))
            return known.answered(number)

    def _take(self, news: ev.Event | News) -> None:
        self._inbox.append(news)
        self.take_in()

    def _left_gradients(self, numbers: Sequence[int]) -> set[int]:
        """Of these parameters, once no function is half-way."""
        with self.paused(self._job.timeout_seconds, "optimizer.step() on the coordinator"):
            return self._worker_calls.left_gradients([known.peer for known in self._workers.values()], numbers)

    def _forget_worker(self, incarnation: str) -> None:
        known = self._workers.pop(incarnation, None)
        if known is not None:
            self._lost_gradients.update(dict.fromkeys(known.left, known))

    def _raise_lost_gradients(self) -> None:
        """Once: what later functions would have stepped with is gone, and no other worker has it."""
        with self._lock:
            lost, self._lost_gradients = self._lost_gradients, {}
        if not lost:  # another thread has just raised it
            return
        number, known = next(iter(lost.items()))
        name = next((spec.name for spec in self._job.variables.specs() if spec.number == number), "a parameter")
        raise known.lost_gradient(name)

    def _left_elsewhere(self, known: KnownWorker) -> tuple[int, ...]:
        return tuple({number for other in self._workers.values() if other is not known for number in other.left})

    def _recall(self, action: ev.Recall) -> None:
        known = self._workers.get(action.incarnation)
        if known is not None:
            self._outbox.append(partial(self._worker_calls.send_recall, known, known.recalled(action.functions)))


def _closed(what: str) -> ContextError:
    return ContextError(f"{what} coordinator's strategy was closed; its job is over. Make a new strategy.")
