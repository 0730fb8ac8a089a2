"""One execution of a scheduled function on this worker."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat import context
from torchstrat.errors import ContextError, OutOfRangeError
from torchstrat.parameter_server import warm_up
from torchstrat.parameter_server.worker.copies import Copies
from torchstrat.parameter_server.worker.steps import RemoteSteps
from torchstrat.parameter_server.worker.tables import TableLookups


class _Running(threading.local):
    run: FunctionRun | None = None


_running = _Running()


class FunctionRun:
    """Names what a function changes on the servers: its pushes are counted, so that a repetition repeats the names.

    A function that runs a second time, because its first worker was lost, makes its pushes in the same order; those
    that a server has applied already are not applied again.
    """

    def __init__(self, function: int, incarnation: str, worker_index: int) -> None:
        self.function = function
        self.worker_index = worker_index
        self._incarnation = incarnation
        self._indices = itertools.count()

    def next_push(self) -> tuple[int, int, str]:
        return self.function, next(self._indices), self._incarnation


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


@contextmanager
def running(run: FunctionRun) -> Iterator[None]:
    _running.run = run
    try:
        yield
    finally:
        _running.run = None


class Executor:
    """Runs functions one after the other in the strategy's cross-replica context."""

    def __init__(self, strategy: Any, copies: Copies, number_of: Callable[[Optimizer], int | None]) -> None:
        self._strategy = strategy
        self._copies = copies
        self._access = copies.access
        self._number_of = number_of
        self._stepped = False

    def call(
        self,
        run: FunctionRun,
        load: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Iterable[Any]]],
        seed: int,
        *,
        rested: bool,
    ) -> Any:
        """Run one function and return what it returned.

        ``load()`` unpickles it: the function, its arguments, and the captured objects that these reach. A function
        that follows another begins with the values that the other's last step brought; one that comes after a rest
        reads them first. The random state is the function's own, so that it draws the same wherever it runs, and when
        it runs again.
        """
        warm_up.wait()  # before the seeding: that import draws random numbers
        if rested or not self._stepped:
            self._copies.expire()
        self._stepped = False
        with running(run), context.enter(self._strategy, None), _seeded(seed):
            fn, args, kwargs, captured = load()
            reached = frozenset(self._variables(captured))
            self._copies.refresh(reached)
            steps = RemoteSteps(self._copies, self._access, self._number_of, lambda: reached)
            with ExitStack() as stack:
                stack.enter_context(steps)
                if self._copies.has_tables(reached):
                    stack.enter_context(TableLookups(self._copies, self._access))
                result = _call(fn, args, kwargs)
            self._access.push(self._copies.take_edits(reached))
            self._stepped = steps.stepped
            return result

    def _variables(self, captured: Iterable[Any]) -> Iterator[int]:
        for value in captured:
            for tensor in _tensors_of(value):
                spec = self._copies.spec_of(tensor)
                if spec is not None:
                    yield spec.number


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """PyTorch's generators, seeded for one function; afterwards as they were (this may be a thread of a test)."""
    if torch.cuda.is_initialized():
        with torch.random.fork_rng([torch.cuda.current_device()]):
            torch.manual_seed(seed)
            yield
        return
    # torch.manual_seed would note the stack for every kind of accelerator that may be used later: 0.3 ms per function.
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return fn(*args, **kwargs)
    except StopIteration as end:
        raise OutOfRangeError(
            "the function called next() on an iterator that has no more batches on this worker; make a new one with "
            "iter(per_worker_dataset) for every pass over the data, and schedule no more functions than it has batches."
        ) from end


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Optimizer):
        for group in value.param_groups:
            yield from group["params"]
