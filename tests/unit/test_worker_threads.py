"""The threads of replicas in one process: kept from run to run, woken through pipes, gone with the strategy."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torchstrat as ts
from torchstrat._torch_private import optimizer_pre_hooks, registration_hooks
from torchstrat.replicas.baton import Baton
from torchstrat.replicas.worker_threads import AutogradBacklog, WorkerThreads

pytestmark = pytest.mark.unit

CPUS = ["cpu:0", "cpu:1"]


@pytest.fixture
def threads() -> Iterator[WorkerThreads]:
    pool = WorkerThreads("kept")
    yield pool
    pool.close()


@pytest.fixture
def strategy() -> Iterator[ts.Strategy]:
    strategy = ts.MirroredStrategy(CPUS)
    yield strategy
    strategy.close()


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def open_files() -> int:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("the system does not list open files")
    return len(list(folder.iterdir()))


def add(payloads):
    return dict.fromkeys(payloads, sum(payloads.values()))


def test_neither_threads_nor_files_pile_up(strategy: ts.Strategy) -> None:
    before = names()
    strategy.run(lambda: None)
    made, files = names(), open_files()
    assert len(made) == len(before) + 2
    for _ in range(50):
        strategy.run(lambda: ts.get_replica_context().all_reduce("sum", torch.ones(())))
    assert names() == made
    assert open_files() == files


def test_both_go_with_the_strategy() -> None:
    gc.collect()
    before, files = names(), open_files()
    for ending in (ts.Strategy.close, lambda _: None):
        strategy = ts.MirroredStrategy(CPUS)
        strategy.run(lambda: None)
        ending(strategy)
        del strategy
        gc.collect()
        assert names() == before
        assert open_files() == files


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
            strategy.run(lambda: None)
    assert strategy.run(lambda: 1) == 1


def test_a_closed_strategy_that_runs_again_makes_new_threads(strategy: ts.Strategy) -> None:
    for _ in range(2):
        assert strategy.run(lambda: 1) == 1
        strategy.close()


def test_every_replica_has_its_own_thread(strategy: ts.Strategy) -> None:
    idents = [strategy.local_results(strategy.run(threading.get_ident)) for _ in range(3)]
    assert len(set(idents)) == 1
    assert len({*idents[0], threading.get_ident()}) == 3


@pytest.mark.parametrize("wakes", ["nobody", "the caller", "the first", "the last"])
def test_a_wake_up_too_many_does_no_harm(threads: WorkerThreads, wakes: str) -> None:
    log: list[int] = []

    def body(me: int) -> int:
        first, last = threads.first(2)
        gates = {"the caller": threads.callers_gate, "the first": first.gate, "the last": last.gate}
        if wakes in gates:
            gates[wakes].open()
        log.append(me)
        total: int = Baton.meet(baton, "sum", me + 1, add)
        log.append(me)
        return total

    for _ in range(20):
        baton = Baton([0, 1], threads, lambda _: None)
        assert baton.run(body) == {0: 3, 1: 3}
    assert log == [0, 1, 0, 1] * 20


def test_many_meetings_of_many_bodies(threads: WorkerThreads) -> None:
    turns: list[int] = []

    def body(me: int) -> int:
        total = 0
        for number in range(200):
            turns.append(me)
            total += baton.meet(f"sum {number}", 1, add)
        return total

    baton = Baton(range(5), threads, lambda _: None)
    assert baton.run(body) == dict.fromkeys(range(5), 1000)
    assert turns == [*range(5)] * 200


def test_interruptions_at_any_moment_leave_a_strategy_that_goes_on(strategy: ts.Strategy) -> None:
    """Where the run was then must not matter: the next one works, and no stream of random numbers is left in place."""
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
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
    interrupted = 0
    for number in range(40):
        fire = threading.Timer(duration * number / 20, signal.pthread_kill, (caller, signal.SIGINT))
        try:
            fire.start()
            while True:
                strategy.run(step)
        except KeyboardInterrupt:
            interrupted += 1
        fire.join()
        assert torch.equal(torch.rand(3), expected[number])
        assert not any(registration_hooks)
        assert not optimizer_pre_hooks
        strategy.run(step)
    assert interrupted == 40
    weights = strategy.local_results(strategy.run(lambda: model.weight.detach().clone()))
    assert torch.equal(*weights)
    assert model.weight.isfinite().all()


def test_forked_children_do_not_disturb_the_threads(strategy: ts.Strategy) -> None:
    strategy.run(lambda: None)
    child = os.fork()
    if child == 0:
        engine = strategy._engine
        engine._threads.first(1)[0].gate.open()  # type: ignore[attr-defined]
        engine._threads.callers_gate.open()  # type: ignore[attr-defined]
        os._exit(0)
    os.waitpid(child, 0)
    assert strategy.run(lambda: 1) == 1


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("not today")


class _Leaves(torch.autograd.Function):
    """Its gradient, which has an object in Python, waits in the queue for what comes before the failure."""

    left: list[weakref.ref[torch.Tensor]]

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        _Leaves.left.append(weakref.ref(gradient))
        return gradient


def test_what_a_failed_backward_pass_leaves_in_a_thread_is_dropped_before_the_thread_ends():
    seen = []

    def body() -> None:
        backlog = AutogradBacklog()
        x = torch.ones(3, requires_grad=True)
        early = x.sin()  # made before what fails, so it would run after it
        failing = _Fails.apply(x)
        _Leaves.left = []
        with pytest.raises(ArithmeticError):
            (_Leaves.apply(early) + failing).sum().backward()
        seen.append([one() is not None for one in _Leaves.left])
        backlog.drop()
        seen.append([one() is not None for one in _Leaves.left])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [[True], [False]]
