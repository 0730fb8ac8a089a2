"""One execution of a scheduled function on this worker, and its outcome on the way to the coordinator."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.core import context
from torchstrat.core.context import StrategyLike
from torchstrat.core.errors import ContextError, NotSendableError, OutOfRangeError, TorchstratError
from torchstrat.core.randomness import state_of
from torchstrat.parameter_server.dispatch import Gradients, Raised, Report
from torchstrat.parameter_server.interface import Endpoint, Peer
from torchstrat.parameter_server.messages import SetAttributes, Token
from torchstrat.parameter_server.server.deduplication import EarlierRuns
from torchstrat.parameter_server.transport.requests import pack
from torchstrat.parameter_server.variables.remote_access import ServerGroup
from torchstrat.parameter_server.worker.gradients import LeftGradients
from torchstrat.parameter_server.worker.local_variables import Copies
from torchstrat.parameter_server.worker.push import RemoteSteps, compiler
from torchstrat.parameter_server.worker.session import ChangedMembers

_PATIENCE_SECONDS = 0.005
"""How long an outcome waits for others to be reported with."""


make_strategy: Callable[[str, ServerGroup, Callable[[], AbstractContextManager[None]]], context.StrategyLike]
"""What stands for the strategy in scheduled functions: of a device, the servers as this worker calls them, and a block
whose gradients are left to them. The room of strategies puts it here."""


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
        self._results: list[object] = []
        self._seconds = 0.0
        self._left: tuple[int, ...] = ()
        self._gradients: dict[int, str | None] = {}
        self._wrote_parameters = self._accumulates = False
        self._oldest = 0.0
        self._is_watched = False  # the thread wakes in time
        self._closed = False
        self._thread: threading.Thread | None = None

    def note(self, left: tuple[int, ...], gradients: Gradients, *, wrote_parameters: bool, accumulates: bool) -> None:
        """How things are here after the function whose outcome comes next, see `Report`."""
        self._left, self._wrote_parameters, self._accumulates = left, wrote_parameters, accumulates
        if gradients:
            with self._lock:
                self._gradients.update(gradients)

    def add(self, to: Peer, function: int, result: object, seconds: float, *, is_last: bool) -> None:
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

    def rest(self, **others: object) -> Report:
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
            gradients=tuple(self._gradients.items()),
            **others,
        )
        self._gradients.clear()
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


class _Running(threading.local):
    run: FunctionRun | None = None


_running = _Running()


class FunctionRun:
    """Names what a function changes on the servers: its pushes are counted, so that a repetition repeats the names.

    A function that runs a second time, because its first worker was lost, makes its pushes in the same order; those
    that a server has applied already are not applied again.
    """

    def __init__(self, function: int, incarnation: str, worker_index: int, *, is_repeated: bool) -> None:
        self.function = function
        self._is_repeated = is_repeated
        self._earlier: EarlierRuns | None = None
        self.worker_index = worker_index
        self._incarnation = incarnation
        self._indices = itertools.count()

    def next_push(self) -> tuple[int, int, str]:
        return self.function, next(self._indices), self._incarnation

    def check(self, index: int, parts: Mapping[int, Mapping[str, object]], servers: ServerGroup) -> None:
        if self._is_repeated:
            if self._earlier is None:
                self._earlier = EarlierRuns(self.function, servers.ask_all("ps.applied_parts", self.function))
            self._earlier.check(index, parts)


def current_run() -> FunctionRun:
    """The run that the calling thread works for."""
    if _running.run is None:
        raise ContextError(
            "variables on parameter servers were used on a worker outside of a scheduled function (in a thread that "
            "the function started, or in a data-loading process). Read or change them in the function itself."
        )
    return _running.run


def current_worker_index() -> int:
    """Raises `ContextError` outside of a scheduled function."""
    if _running.run is None:
        raise ContextError(
            "get_current_worker_index() works inside a function that a ClusterCoordinator has scheduled, or in the "
            "dataset function of create_per_worker_dataset, where it runs on a worker."
        )
    return _running.run.worker_index


class _RunningHere:
    """``with _RunningHere(run):`` the calling thread works for it. This and `_Seeded` are plain classes, no generators:
    every function enters them, and the smallest take no longer than a few microseconds."""

    __slots__ = ("_run",)

    def __init__(self, run: FunctionRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        _running.run = self._run

    def __exit__(self, *_: object) -> None:
        _running.run = None


class Executor:
    """Runs functions one after the other in the strategy's cross-replica context."""

    def __init__(
        self,
        strategy: StrategyLike,
        copies: Copies,
        left: LeftGradients,
        number_of: Callable[[Optimizer], int | None],
        attributes_of: Callable[[Token], SetAttributes],
        is_captured: Callable[[object], bool],
    ) -> None:
        self._left = left
        self._copies = copies
        self._access = copies.access
        self._context = context.enter(strategy, None)
        self.steps = RemoteSteps(copies, self._access, number_of, left, attributes_of)
        self._members = ChangedMembers(is_captured, copies)
        self._stepped = False

    def call(
        self,
        run: FunctionRun,
        load: Callable[
            [], tuple[Callable[..., object], tuple[object, ...], dict[str, object], Iterable[object], set[int]]
        ],
        seed: int,
        *,
        rested: bool,
    ) -> object:
        """Run one function and return what it returned.

        ``load()`` unpickles it: the function, its arguments, the captured objects that these are seen to reach, and
        numbers of variables that it has reached besides when it ran before, to which this run's are added. A function
        that follows another begins with the values that the other's last step brought; one that comes after a rest
        reads them first. The random state is the function's own, so that it draws the same wherever it runs, and when
        it runs again.
        """
        compiler.wait()  # before the seeding: that import draws random numbers
        if rested or not self._stepped:
            self._copies.expire()
        self._stepped = False
        if (rows := self._copies.lookups.rows).ahead:
            rows.begin_function(rested=rested)
        with _RunningHere(run), self._context, _Seeded(seed):
            fn, args, kwargs, captured, learned = load()
            seen = set(self._variables(captured))
            self._copies.begin(seen | learned)
            self.steps.watch(captured)
            try:
                result = self._call(fn, args, kwargs)
            except BaseException:
                self._copies.recover()
                raise
            finally:
                self._copies.end()
                learned |= self._copies.reached - seen
            self._stepped = self.steps.stepped
            return result

    def _call(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        self._left.begin()
        try:
            with self.steps, self._members:
                result = _call(fn, args, kwargs)
                self._members.check()
        except BaseException as error:
            if _is_of_program(error):
                self._finish()  # as on one device: what it has changed before stays
            else:
                self._copies.leave_graph()
                self._left.end(self._copies.reached)
            raise
        self._finish()
        return result

    def _finish(self) -> None:
        self._copies.leave_graph()
        try:
            taken = self._left.take(self.steps.name_of)
        finally:
            self._left.end(self._copies.reached)
        self.steps.check_states()
        if self._copies.reached or self._left.accumulates:
            self.steps.finish(taken)

    def release(self, numbers: Collection[int]) -> None:
        """Let go of copies of these variables, and of what the last function has left."""
        self.steps.watch(())
        self._left.forget(numbers)
        self._copies.lookups.rows.forget(numbers)
        self._copies.release(numbers)

    def _variables(self, captured: Iterable[object]) -> Iterator[int]:
        for value in captured:
            if isinstance(value, nn.Module):
                yield from self._copies.numbers_under(value)
            elif isinstance(value, Optimizer):
                yield from (spec.number for spec in self._copies.specs_of(value).values())
            elif isinstance(value, torch.Tensor) and (spec := self._copies.spec_of(value)) is not None:
                yield spec.number


class _Seeded:
    """PyTorch's generators, seeded for one function; afterwards as they were (this may be a thread of a test)."""

    __slots__ = ("_before", "_forked", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._forked: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if torch.cuda.is_initialized():
            self._forked = torch.random.fork_rng([torch.cuda.current_device()])
            self._forked.__enter__()
            torch.manual_seed(self._seed)
            return
        # torch.manual_seed would note the stack for every kind of accelerator that may be used later: 0.3 ms per
        # function.
        generator = torch.default_generator
        self._before = state_of(generator)
        generator.manual_seed(self._seed)

    def __exit__(self, *raised: Any) -> None:
        if self._forked is not None:
            self._forked.__exit__(*raised)
        else:
            torch.default_generator.set_state(self._before)


def _call(fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    try:
        return fn(*args, **kwargs)
    except StopIteration as end:
        raise OutOfRangeError(
            "the function called next() on an iterator that has no more batches on this worker; make a new one with "
            "iter(per_worker_dataset) for every pass over the data, and schedule no more functions than it has batches."
        ) from end


def _is_of_program(error: BaseException) -> bool:
    """Whether the function's own code has raised it (``sys.exit()`` too), and not torchstrat, which refuses it."""
    return not isinstance(error, TorchstratError) or isinstance(error, OutOfRangeError)
