"""Gradients that functions leave, and killed workers. Under ``no_sync`` each is stepped with exactly once; others are
gone with their worker, which is said."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS, Counters, cluster_with, is_back, wait_until
from torchstrat.cluster_resolver import ClusterResolver
from torchstrat.testing.fault_plan import Fault, FaultPlan, phases

pytestmark = [pytest.mark.deadline(420), pytest.mark.usefixtures("clusters_share_a_fork_server")]

SIZE = 4000
LEAVES = 6
"""Functions that leave gradients, between two steps."""


class Accumulation:
    """Function n leaves a gradient of -1 at place n of three vectors, which are on two servers; every few of them
    another function steps with what was left."""

    def __init__(self, resolver: ClusterResolver) -> None:
        self.strategy = strategy = ts.ParameterServerStrategy(resolver)
        with strategy.scope():
            self.model = model = Counters(SIZE)
            self.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.coordinator = ts.ClusterCoordinator(strategy)
        self.places = 0

        def leave(place):
            with ts.get_strategy().no_sync():
                sum(-vector[place] for vector in model.vectors).backward()

        def step():
            optimizer.step()
            optimizer.zero_grad()

        self._leave, self._step = leave, step

    def leave(self) -> None:
        for _ in range(LEAVES):
            self.coordinator.schedule(self._leave, args=(self.places,))
            self.places += 1

    def step(self) -> None:
        self.coordinator.schedule(self._step)

    def join(self) -> None:
        self.coordinator.join(PATIENCE_SECONDS)

    def check(self, stepped: int) -> None:
        """The first so many places were stepped once, no others."""
        wanted = (torch.arange(SIZE) < stepped).float()
        for name, vector in self.model.state_dict().items():
            wrong = (vector != wanted).nonzero().flatten().tolist()
            assert not wrong, f"vector {name}: {[(at, float(vector[at])) for at in wrong[:10]]} of {stepped}"


@pytest.mark.parametrize("exactly_once", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_workers_that_are_killed_while_they_leave_gradients(tmp_path: Path, exactly_once: bool) -> None:
    """The control: servers that forget what they have added add it twice."""
    plan = FaultPlan(tmp_path / "plan", exactly_once=exactly_once)
    kills = [Fault(phase) for phase in (phases.PUSHED, phases.PUSHED_TO_ONE, phases.INSIDE, phases.IDLE)] * 2
    with cluster_with(plan) as cluster:
        job = Accumulation(cluster.resolver)
        job.leave()
        job.join()
        plan.add("worker", 1, *kills)

        def is_over() -> bool:
            job.leave()
            job.step()
            job.join()
            return len(plan.fired("worker", 1)) == len(kills) and is_back(plan, "worker", 1)

        wait_until(is_over, "the kills")
        job.step()
        job.join()
        with nullcontext() if exactly_once else pytest.raises(AssertionError, match="vector"):
            job.check(job.places)
        job.strategy.close()


def test_all_workers_are_killed_between_what_was_left_and_the_step(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "plan")
    with cluster_with(plan) as cluster:
        job = Accumulation(cluster.resolver)
        for _ in range(3):
            before = job.places
            job.leave()
            job.join()
            job.check(before)
            for worker in range(2):
                cluster.kill("worker", worker)
            job.step()
            job.join()
            job.check(job.places)
        job.strategy.close()


def test_gradients_that_are_lost_with_their_worker_are_told_of_once(tmp_path: Path) -> None:
    with cluster_with(FaultPlan(tmp_path / "plan")) as cluster:
        job = Accumulation(cluster.resolver)
        vectors, optimizer, schedule = job.model.vectors, job.optimizer, job.coordinator.schedule

        def train(place: int) -> None:
            optimizer.zero_grad()
            sum(-vector[place] for vector in vectors).backward()
            optimizer.step()

        def kill_all() -> None:
            for worker in range(2):
                cluster.kill("worker", worker)

        for _ in range(4):
            schedule(train, args=(0,))
        job.join()
        kill_all()  # what they had left was stepped with
        schedule(lambda: sum(-vector[1] for vector in vectors).backward()).get(PATIENCE_SECONDS)
        kill_all()

        def is_told() -> bool:
            try:
                job.coordinator.done()
            except ts.errors.TorchstratError as error:
                return "and with it gradients of" in str(error) and "no step has used them" in str(error)
            return False

        wait_until(is_told, "the loss of gradients")
        for _ in range(4):
            schedule(train, args=(2,))
        job.join()
        assert [int(number) for number in job.model.state_dict()["vectors.0"][:3]] == [4, 0, 4]
        job.strategy.close()
