"""Replicas of one process take turns on threads of their own: the order, failures, interruptions, and what is left."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as registrations
from torch.overrides import TorchFunctionMode, _len_torch_function_stack

import torchstrat as ts
from tests.faults.forked import in_fork
from tests.support.replicas import cpus, replica

optimizers: Any = importlib.import_module("torch.optim.optimizer")  # which torch.optim hides


@pytest.fixture
def strategy() -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy(cpus(2))
    yield made
    made.close()


@pytest.fixture
def three() -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy(cpus(3))
    yield made
    made.close()


def meet(value: float = 1.0) -> float:
    context = ts.get_replica_context()
    assert context is not None
    return float(context.all_reduce("sum", torch.tensor(value)))


def works(strategy: ts.Strategy) -> bool:
    count = strategy.num_replicas_in_sync
    return strategy.local_results(strategy.run(meet)) == (float(count),) * count


def test_a_fork_has_threads_of_its_own(strategy: ts.Strategy) -> None:
    assert works(strategy)
    outcome = in_fork(60, lambda: False, works, strategy)
    assert (outcome.how, outcome.text) == ("returned", "True")
    assert works(strategy)


def names() -> list[str]:
    """Of the replicas' threads: others end in their own time."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchstrat-Mirrored")]


def open_files() -> int:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("the system does not list open files")
    return len(list(folder.iterdir()))


# -- turns -------------------------------------------------------------------------------------------------------------


def test_replicas_alternate_only_where_they_meet(three: ts.Strategy) -> None:
    turns: list[int] = []

    def step() -> float:
        total = 0.0
        for _ in range(100):
            turns.append(replica())
            total += meet(replica() + 1.0)
        turns.append(replica())
        return total

    assert three.local_results(three.run(step)) == (600.0,) * 3
    assert turns == [0, 1, 2] * 101


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("before_meeting", [True, False])
def test_the_first_exception_ends_all_and_is_raised(three: ts.Strategy, culprit: int, before_meeting: bool) -> None:
    unwound: list[int] = []

    def step() -> None:
        try:
            if not before_meeting:
                meet()
            if replica() == culprit:
                raise KeyError("mine")
            meet()
        finally:
            unwound.append(replica())

    with pytest.raises(KeyError, match="mine") as raised:
        three.run(step)
    assert f"replica {culprit} of 3" in "".join(getattr(raised.value, "__notes__", []))
    assert sorted(unwound) == list(range(culprit + 1) if before_meeting else range(3))
    assert works(three)


def test_an_error_where_they_meet_is_raised_even_if_the_step_swallows_it(strategy: ts.Strategy) -> None:
    def fail(_: ts.Strategy) -> None:
        raise ValueError("in the middle")

    def step() -> str:
        try:
            ts.get_replica_context().merge_call(fail)  # type: ignore[union-attr]
        except Exception:
            return "swallowed"
        return "nothing was raised"

    with pytest.raises(ValueError, match="in the middle"):
        strategy.run(step)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_neither_threads_nor_files_pile_up_and_each_replica_keeps_its_own(strategy: ts.Strategy) -> None:
    before = names()
    first = strategy.local_results(strategy.run(threading.get_ident))
    made, files = names(), open_files()
    assert len(made) == len(before) + 2
    assert len({*first, threading.get_ident()}) == 3
    for _ in range(50):
        strategy.run(meet)
    assert strategy.local_results(strategy.run(threading.get_ident)) == first
    assert names() == made
    assert open_files() <= files


def test_both_go_with_the_strategy() -> None:
    gc.collect()
    before, files = names(), open_files()
    for ending in (ts.Strategy.close, lambda _: None):
        strategy = ts.MirroredStrategy(cpus(2))
        strategy.run(meet)
        ending(strategy)
        del strategy
        gc.collect()
        assert names() == before
        assert open_files() <= files


def test_a_closed_strategy_that_runs_again_makes_new_threads(strategy: ts.Strategy) -> None:
    for _ in range(2):
        assert works(strategy)
        strategy.close()


def test_a_thread_that_cannot_be_made_is_an_error_at_once(
    strategy: ts.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = iter([os.pipe()])

    def pipe() -> tuple[int, int]:
        try:
            return next(pipes)
        except StopIteration:
            raise OSError("too many open files") from None

    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", pipe)
        with pytest.raises(OSError, match="too many"):
            strategy.run(meet)
    assert works(strategy)


def test_forked_children_do_not_disturb_the_threads(strategy: ts.Strategy) -> None:
    strategy.run(meet)
    child = os.fork()
    if child == 0:
        strategy.close()  # which wakes threads that are the parent's
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(3):
        assert works(strategy)


# -- what a run leaves behind ------------------------------------------------------------------------------------------


def hooks() -> list[int]:
    """How many of PyTorch's global hooks there are: on registrations, and before steps of optimizers."""
    found = [getattr(registrations, f"_global_{kind}_registration_hooks") for kind in ("module", "parameter", "buffer")]
    return [len(one) for one in (*found, optimizers._global_optimizer_pre_hooks)]


def test_the_hooks_of_a_run_go_with_it(strategy: ts.Strategy) -> None:
    seen: list[list[int]] = []
    with strategy.scope():  # the members' hooks are there already, and stay
        strategy.run(lambda: seen.append(hooks()))
        assert hooks() == [1, 1, 1, 0]
    strategy.run(lambda: seen.append(hooks()))
    assert seen == [[1, 1, 1, 1]] * 4
    assert hooks() == [0] * 4
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert hooks() == [0] * 4


def test_what_a_replica_leaves_on_its_thread_goes_with_it(strategy: ts.Strategy) -> None:
    class Mode(TorchFunctionMode):
        pass

    assert len(strategy.local_results(strategy.run(lambda: Mode().__enter__()))) == 2
    assert strategy.run(_len_torch_function_stack) == 0


def test_interruptions_at_any_moment_leave_a_strategy_that_goes_on(strategy: ts.Strategy) -> None:
    """Where the run was then must not matter: the next one works, and no stream of random numbers is left in place."""
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.rand(3, 2)).sum().backward()
        optimizer.step()

    caller = threading.get_ident()
    for _ in range(3):
        strategy.run(step)
    began = time.perf_counter()
    strategy.run(step)
    duration = time.perf_counter() - began
    torch.manual_seed(1)
    expected = [torch.rand(3) for _ in range(40)]
    torch.manual_seed(1)

    def run_until(fire: threading.Timer) -> None:
        fire.start()
        while True:
            strategy.run(step)

    for number in range(40):
        fire = threading.Timer(duration * number / 20, signal.pthread_kill, (caller, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run_until(fire)
        fire.join()
        assert torch.equal(torch.rand(3), expected[number])
        assert hooks() == [0] * 4
        strategy.run(step)
    weights = strategy.local_results(strategy.run(lambda: model.weight.detach().clone()))
    assert torch.equal(*weights)
    assert model.weight.isfinite().all()
    tracer = sys.gettrace()
    sys.settrace(lambda *_: None)
    hooks()  # would never begin in Python 3.11, were anything still on its way to a thread
    sys.settrace(tracer)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("not today")


class _Leaves(torch.autograd.Function):
    """Its gradient, which has an object in Python, waits in the queue for what comes before the failure."""

    left: list[weakref.ref[torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        _Leaves.left.append(weakref.ref(gradient))
        return gradient


def test_what_a_failed_backward_pass_leaves_is_dropped_before_its_thread_ends(strategy: ts.Strategy) -> None:
    """PyTorch would free it when the thread is gone, and needs Python for that, which may have ended by then."""
    _Leaves.left, alive_at_the_end = [], []

    class LastToGo:
        """What a thread keeps is dropped by Python when the thread's function has returned."""

        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            alive_at_the_end.append(_Leaves.left[self.number]() is not None)

    @functools.cache
    def kept() -> threading.local:
        return threading.local()  # out of the strategy's reach: it hands those that it sees to the calling thread

    def step() -> None:
        kept().last = LastToGo(replica())
        x = torch.ones(3, requires_grad=True)
        early = x.sin()  # made before what fails, so it would run after it
        failing = _Fails.apply(x)
        with pytest.raises(ArithmeticError):
            (_Leaves.apply(early) + failing).sum().backward()

    strategy.run(step)
    assert [one() is not None for one in _Leaves.left] == [True] * 2
    strategy.close()
    assert alive_at_the_end == [False] * 2
