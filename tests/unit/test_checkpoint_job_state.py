"""The job's own part of a checkpoint: random numbers go on where they were, so that the curve does too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torchstrat as ts
from tests.support.checkpoints import torch_alone


def mirrored(replicas: int = 2) -> ts.Strategy:
    return ts.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])


STRATEGIES: dict[str, Callable[[], ts.Strategy]] = {
    "one": lambda: ts.OneDeviceStrategy("cpu:0"),
    "mirrored 2": mirrored,
    "mirrored 4": lambda: mirrored(4),
    "central": lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "tpu": lambda: ts.testing.fake_tpu_strategy(replicas=2, logical_devices=1),
}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def drawn() -> list[Any]:
    """Of the process's generators."""
    return [torch.rand(3).tolist(), random.random(), np.random.standard_normal(3).tolist()]


def make(strategy: ts.Strategy) -> dict[str, Any]:
    """With dropout, which draws in the step."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}


def step_on(objects: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
    objects["optimizer"].zero_grad()
    loss: torch.Tensor = objects["model"](inputs).square().mean()
    loss.backward()
    objects["optimizer"].step()
    return loss.detach()


class Training:
    """Dropout in the step, and draws of all kinds around it."""

    def __init__(self, strategy: ts.Strategy, number: int = 7) -> None:
        self.strategy = strategy
        seed(number)
        self.objects = make(strategy)
        self.checkpoint = ts.Checkpoint(**self.objects)

    def steps(self, count: int) -> list[Any]:
        return [self._step() for _ in range(count)]

    def _step(self) -> Any:
        inputs = torch.randn(6, 4, dtype=torch.float64) + random.random() + np.random.standard_normal()
        return self._on_replicas(lambda: step_on(self.objects, inputs))

    def draws(self) -> list[float]:
        return self._on_replicas(lambda: torch.rand(()))

    def _on_replicas(self, call: Callable[[], torch.Tensor]) -> list[float]:
        return [one.item() for one in self.strategy.local_results(self.strategy.run(call))]


@pytest.fixture
def begin() -> Iterator[Callable[..., Training]]:
    begun: list[Training] = []

    def new(strategy: ts.Strategy, number: int = 7) -> Training:
        begun.append(Training(strategy, number))
        return begun[-1]

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield new
    for one in begun:
        one.strategy.close()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


Begin = Callable[..., Training]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_curve_goes_on(kind: str, begin: Begin, tmp_path: Path) -> None:
    before = begin(STRATEGIES[kind]())
    before.steps(2)
    before.checkpoint.save(tmp_path / "saved")
    expected = before.steps(3)
    after = begin(STRATEGIES[kind](), 99)
    after.steps(1)
    after.checkpoint.restore(tmp_path / "saved")
    assert after.steps(3) == expected


def test_other_numbers_of_replicas(begin: Begin, tmp_path: Path) -> None:
    """Replicas that are in both go on; those that are new begin with the seed, as they would have."""
    first, later = {}, {}
    for replicas in (2, 4):
        job = begin(mirrored(replicas))
        first[replicas] = job.draws()
        job.checkpoint.save(tmp_path / str(replicas))
        later[replicas] = job.draws()
    assert first[4][:2] == first[2]
    for replicas, of, expected in ((4, 2, [*later[2], *first[4][2:]]), (2, 4, later[4][:2])):
        job = begin(mirrored(replicas), 99)
        job.checkpoint.restore(tmp_path / str(of))
        assert job.draws() == expected


def test_seeding_after_a_restore_begins_anew(begin: Begin, tmp_path: Path) -> None:
    job = begin(mirrored())
    seed(5)
    first = job.steps(1)
    job.checkpoint.save(tmp_path / "saved")
    seed(5)
    begun = drawn()
    job.checkpoint.restore(tmp_path / "saved")
    seed(5)
    assert drawn() == begun
    # The streams of the replicas, too: the dropout of the first step is that of the first step.
    other = Training(mirrored())
    seed(5)
    assert other.steps(1) == first
    other.strategy.close()


@pytest.mark.parametrize("kind", ["mirrored 2", "tpu"])
def test_a_seed_that_was_put_aside_goes_on_too(kind: str, begin: Begin, tmp_path: Path) -> None:
    job = begin(STRATEGIES[kind]())
    job.draws()
    seven = torch.get_rng_state()
    torch.manual_seed(8)
    job.draws()
    job.checkpoint.save(tmp_path / "saved")
    eight = job.draws()
    torch.set_rng_state(seven)
    expected = job.draws()
    after = begin(STRATEGIES[kind](), 99)
    after.checkpoint.restore(tmp_path / "saved")
    assert after.draws() == eight
    torch.set_rng_state(seven)
    assert after.draws() == expected


@torch_alone
def test_generators_of_this_process(tmp_path: Path) -> None:
    weight = torch.zeros(2)
    checkpoint = ts.Checkpoint(weight=weight)
    np.random.standard_normal()  # leaves a second one for later
    checkpoint.save(tmp_path / "saved")
    expected = drawn()
    checkpoint.restore(tmp_path / "saved")
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "torch", no_dist=True)
    checkpoint.restore(tmp_path / "torch")  # which has none of it, and leaves all alone
    assert weight.tolist() == [1.0, 1.0]
    assert drawn() == expected
