"""The job's own part of a checkpoint: random numbers go on where they were, so that the curve does too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torchstrat as ts
from torchstrat.checkpoint import job_state
from torchstrat.errors import InvalidArgumentError
from torchstrat.replicas.randomness import seedings
from torchstrat.testing.fake_cluster import FakeCluster

STRATEGIES: dict[str, Callable[[], ts.Strategy]] = {
    "one": lambda: ts.OneDeviceStrategy("cpu:0"),
    "mirrored 2": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored 4": lambda: ts.MirroredStrategy([f"cpu:{i}" for i in range(4)]),
    "central": lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "tpu": lambda: ts.testing.fake_tpu_strategy(replicas=2, logical_devices=1),
}


class Training:
    """Dropout in the step, and draws of all kinds around it."""

    def __init__(self, strategy: ts.Strategy, seed: int) -> None:
        self.strategy = strategy
        self.seed(seed)
        with strategy.scope():
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.checkpoint = ts.Checkpoint(model=self.model, optimizer=self.optimizer)

    @staticmethod
    def seed(seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def steps(self, count: int) -> list[Any]:
        return [self.step() for _ in range(count)]

    def step(self) -> Any:
        def step() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(inputs).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        inputs = torch.randn(6, 4, dtype=torch.float64) + random.random() + np.random.standard_normal()
        losses = self.strategy.local_results(self.strategy.run(step))
        return [loss.item() for loss in losses]


def forget() -> None:
    """What this process knows of seeds and runs: as a new process."""
    seedings.__init__()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def generators() -> Any:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_curve_goes_on(kind: str, tmp_path: Path) -> None:
    before = Training(STRATEGIES[kind](), seed=7)
    before.steps(2)
    before.checkpoint.save(tmp_path / "saved")
    expected = before.steps(3)
    before.strategy.close()
    forget()
    after = Training(STRATEGIES[kind](), seed=99)
    after.steps(1)
    after.checkpoint.restore(tmp_path / "saved")
    assert after.steps(3) == expected
    after.strategy.close()


def test_without_it_the_curve_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    before = Training(STRATEGIES["mirrored 2"](), seed=7)
    before.steps(2)
    before.checkpoint.save(tmp_path / "saved")
    expected = before.steps(3)
    monkeypatch.setattr(job_state, "reads", lambda *_: job_state.Reads())
    after = Training(STRATEGIES["mirrored 2"](), seed=99)
    after.checkpoint.restore(tmp_path / "saved")
    assert after.steps(3) != expected
    before.strategy.close()
    after.strategy.close()


def test_other_numbers_of_replicas(tmp_path: Path) -> None:
    """Replicas that are in both go on; those that are new begin with the seed, as they would have."""

    def draws(strategy: ts.Strategy) -> list[float]:
        return [one.item() for one in strategy.local_results(strategy.run(lambda: torch.rand(())))]

    def saved(replicas: int) -> tuple[list[float], list[float]]:
        """What each replica draws first, and what after the save."""
        forget()
        job = Training(ts.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]), seed=7)
        first = draws(job.strategy)
        job.checkpoint.save(tmp_path / str(replicas))
        after = draws(job.strategy)
        job.strategy.close()
        return first, after

    def restored(replicas: int, path: str) -> list[float]:
        forget()
        job = Training(ts.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]), seed=99)
        job.checkpoint.restore(tmp_path / path)
        after = draws(job.strategy)
        job.strategy.close()
        return after

    (first_of_2, after_of_2), (first_of_4, after_of_4) = saved(2), saved(4)
    assert first_of_4[:2] == first_of_2
    assert restored(4, "2") == [*after_of_2, *first_of_4[2:]]
    assert restored(2, "4") == after_of_4[:2]


def test_seeding_after_a_restore_begins_anew(tmp_path: Path) -> None:
    job = Training(STRATEGIES["mirrored 2"](), seed=7)
    job.seed(5)
    first = job.steps(1)
    job.checkpoint.save(tmp_path / "saved")
    job.seed(5)
    begun = [torch.randn(6, 4, dtype=torch.float64), random.random(), np.random.standard_normal()]
    job.checkpoint.restore(tmp_path / "saved")
    job.seed(5)
    again = [torch.randn(6, 4, dtype=torch.float64), random.random(), np.random.standard_normal()]
    assert torch.equal(begun[0], again[0])
    assert begun[1:] == again[1:]
    # The streams of the replicas, too: the dropout of the first step is that of the first step.
    other = Training(STRATEGIES["mirrored 2"](), seed=7)
    other.seed(5)
    assert other.steps(1) == first
    job.strategy.close()
    other.strategy.close()


def test_a_seed_that_was_put_aside_goes_on_too(tmp_path: Path) -> None:
    def draws(job: Training) -> list[float]:
        return [one.item() for one in job.strategy.local_results(job.strategy.run(lambda: torch.rand(())))]

    job = Training(STRATEGIES["mirrored 2"](), seed=7)
    draws(job)
    seven = torch.get_rng_state()
    torch.manual_seed(8)
    draws(job)
    job.checkpoint.save(tmp_path / "saved")
    eight = draws(job)
    torch.set_rng_state(seven)
    expected = draws(job)
    forget()
    after = Training(STRATEGIES["mirrored 2"](), seed=99)
    after.checkpoint.restore(tmp_path / "saved")
    assert draws(after) == eight
    torch.set_rng_state(seven)
    assert draws(after) == expected
    job.strategy.close()
    after.strategy.close()


def test_functions_on_parameter_servers(tmp_path: Path) -> None:
    """Each function's random state goes by its place in the training, not by its number in this job."""

    class Job:
        def __init__(self, cluster: FakeCluster, seed: int) -> None:
            torch.manual_seed(seed)
            self.strategy = cluster.strategy()
            with self.strategy.scope():
                self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
                self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
            self.coordinator = ts.ClusterCoordinator(self.strategy)
            self.checkpoint = ts.Checkpoint(model=self.model, optimizer=self.optimizer)

        def steps(self, count: int) -> list[float]:
            strategy, model, optimizer = self.strategy, self.model, self.optimizer

            def step() -> float:
                def train() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = model(torch.ones(6, 4, dtype=torch.float64)).square().mean()
                    loss.backward()
                    optimizer.step()
                    return loss.detach()

                return strategy.run(train).item()

            results = []
            for _ in range(count):
                results.append(self.coordinator.schedule(step))
                self.coordinator.join(timeout=60)
            return [result.fetch() for result in results]

    with FakeCluster(workers=1, ps=2) as cluster:
        job = Job(cluster, 7)
        job.steps(2)
        job.checkpoint.save(tmp_path / "saved")
        expected = job.steps(3)
        job.checkpoint.restore(tmp_path / "saved")
        assert job.steps(3) == expected
        assert job.steps(1) != expected[:1]
    with FakeCluster(workers=1, ps=1) as cluster:
        job = Job(cluster, 99)
        job.steps(1)
        job.checkpoint.restore(tmp_path / "saved")
        assert job.steps(2) == expected[:2]
        job.checkpoint.save(tmp_path / "again")
        job.steps(1)
        job.checkpoint.restore(tmp_path / "again")
        assert job.steps(1) == expected[2:]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")  # torch's own
def test_a_checkpoint_without_it_leaves_all_alone(tmp_path: Path) -> None:
    weight = torch.zeros(2)
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "torch", no_dist=True)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    ts.Checkpoint(weight=weight).restore(tmp_path / "torch")
    assert weight.tolist() == [1.0, 1.0]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_generators_of_this_process(tmp_path: Path) -> None:
    checkpoint = ts.Checkpoint(weight=torch.zeros(2))
    np.random.standard_normal()  # leaves a second one for later
    checkpoint.save(tmp_path / "saved")
    drawn = [torch.rand(3).tolist(), random.random(), np.random.standard_normal(3).tolist()]
    checkpoint.restore(tmp_path / "saved")
    assert [torch.rand(3).tolist(), random.random(), np.random.standard_normal(3).tolist()] == drawn


def test_the_name_is_taken() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Checkpoint\(torchstrat=…\): under this name"):
        ts.Checkpoint(torchstrat=torch.zeros(1))
