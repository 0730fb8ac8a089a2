"""`PreemptionHandler` with one replica per process: all end after the same step, whoever heard of it."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch

import torchstrat as ts
from torchstrat.testing import Workers

STEPS = 12


def steps_until_told(rank_to_tell: int | None, at: int, *, agreed: bool = True) -> tuple[int, bool, bool]:
    """Steps taken, whether the loop was left early, and whether this process got the signal itself."""
    strategy = ts.MirroredStrategy(timeout=timedelta(minutes=1) if agreed else timedelta(seconds=5))
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
        with ts.PreemptionHandler() as preemption:
            while taken < STEPS and not stops:
                strategy.run(step)
                taken += 1
                if rank == rank_to_tell and taken == at:
                    os.kill(os.getpid(), signal.SIGTERM)
                stops = preemption.should_stop() if agreed else preemption.received is not None
            heard = preemption.received is not None
    finally:
        strategy.close()
    return taken, stops, heard


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", [1, 7])
def test_all_end_after_the_same_step(two_processes: Workers, rank: int, at: int) -> None:
    found = two_processes.run(steps_until_told, rank, at)
    assert found == [(at + 1, True, rank == 0), (at + 1, True, rank == 1)]


def test_a_signal_after_the_last_step_comes_too_late(two_processes: Workers) -> None:
    assert [found[:2] for found in two_processes.run(steps_until_told, 1, STEPS)] == [(STEPS, False)] * 2


def test_nobody_told(two_processes: Workers) -> None:
    assert two_processes.run(steps_until_told, None, 0) == [(STEPS, False, False)] * 2


def without_agreement() -> str:
    try:
        return f"took {steps_until_told(1, 3, agreed=False)[0]} steps"
    except ts.errors.CommunicationError as error:
        return str(error)


def test_without_an_agreement_one_goes_on_alone(two_processes: Workers) -> None:
    """Shows that the tests above test something: rank 0 waits in a step for rank 1, which has left."""
    first, second = two_processes.run(without_agreement)
    assert second == "took 3 steps"
    assert "replica 1 closed its strategy" in first


def one_fails() -> str:
    strategy = ts.MirroredStrategy()
    try:
        with ts.PreemptionHandler(timeout=timedelta(seconds=5)) as preemption:
            for step in range(3):
                preemption.should_stop()
                if os.environ["RANK"] == "1" and step == 1:
                    raise RuntimeError("on purpose")
    except (RuntimeError, ts.errors.CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.close()
    return "went on"


def test_an_error_on_one_rank_hangs_nobody(two_processes: Workers) -> None:
    first, second = two_processes.run(one_fails)
    assert second == "RuntimeError: on purpose"
    assert "the agreement to stop (PreemptionHandler.should_stop)" in first
