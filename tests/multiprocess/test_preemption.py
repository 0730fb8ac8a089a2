"""`PreemptionHandler` with one replica per process: all end after the same step, whoever heard of it."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

import torchstrat as ts
from torchstrat.testing import Workers

STEPS = 12


def steps_until_told(ranks_to_tell: tuple[int, ...], at: int, *, agreed: bool = True) -> tuple[int, bool, bool]:
    """Steps taken, whether the loop was left early, and whether this process got the signal itself."""
    strategy = ts.MirroredStrategy(timeout=timedelta(minutes=1))
    with strategy.scope():
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        (weight - 1).square().sum().backward()
        optimizer.step()

    rank = int(os.environ["RANK"])
    stops, taken = False, 0
    try:
        strategy.run(step)
        groups = len(c10d._world.pg_map)
        with ts.PreemptionHandler() as preemption:
            while taken < STEPS and not stops:
                strategy.run(step)
                taken += 1
                if rank in ranks_to_tell and taken == at:
                    os.kill(os.getpid(), signal.SIGTERM)
                stops = preemption.should_stop() if agreed else preemption.received is not None
            heard = preemption.received is not None
        assert len(c10d._world.pg_map) == groups, "nothing is under way or left"
    finally:
        strategy.close()
    return taken, stops, heard


# Who hears of it, and when, by turns always, and each with each in soak.
SIGNALS = [
    pytest.param(ranks, at, marks=[] if turn == number else pytest.mark.soak)
    for turn, ranks in enumerate([(0,), (1,), (0, 1)])
    for number, at in enumerate((7, 1, STEPS))
]


@pytest.mark.parametrize(("ranks", "at"), [((), 0), *SIGNALS])
def test_all_end_after_the_same_step(two_processes: Workers, ranks: tuple[int, ...], at: int) -> None:
    """A signal after the last step comes too late."""
    in_time = bool(ranks) and at < STEPS
    found = two_processes.run(steps_until_told, ranks, at)
    assert found == [(at + 1 if in_time else STEPS, in_time, rank in ranks) for rank in range(2)]


def without_agreement() -> str:
    try:
        return f"took {steps_until_told((1,), 3, agreed=False)[0]} steps"
    except ts.errors.CommunicationError as error:
        return str(error)


def test_without_an_agreement_one_goes_on_alone(two_processes: Workers) -> None:
    """Shows that the test above tests something: rank 0 waits in a step for rank 1, which has left."""
    first, second = two_processes.run(without_agreement)
    assert second == "took 3 steps"
    assert "replica 1 closed its strategy" in first


def fail_after(asked: dict[int, int]) -> str:
    """What each rank raises after it has asked so often."""
    strategy = ts.MirroredStrategy()
    try:
        with ts.PreemptionHandler(timeout=timedelta(seconds=5)) as preemption:
            for _ in range(asked[int(os.environ["RANK"])]):
                preemption.should_stop()
            raise RuntimeError("on purpose")
    except (RuntimeError, ts.errors.CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.close()


def test_after_an_error_nobody_is_waited_for(two_processes: Workers) -> None:
    assert two_processes.run(fail_after, {0: 1, 1: 2}) == ["RuntimeError: on purpose"] * 2
    first, second = two_processes.run(fail_after, {0: 3, 1: 1})
    assert second == "RuntimeError: on purpose"
    assert "the agreement to stop (PreemptionHandler.should_stop)" in first
