"""Tasks of one host are killed while one of them writes to memory that another reads: no half of anything counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS, Training, is_back
from tests.faults.test_server_loss import EPOCHS
from tests.faults.test_server_loss import Training as LeasedTraining
from torchstrat.launch import LocalCluster
from torchstrat.launch.restarts import RestartPolicy
from torchstrat.parameter_server.worker import phases
from torchstrat.testing.fault_plan import Fault, FaultPlan

AT_ONCE = RestartPolicy(first_delay_seconds=0.0)

pytestmark = [
    pytest.mark.deadline(420),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name is Linux's"),
    pytest.mark.filterwarnings("ignore:.*was not saved:UserWarning"),
]


@contextmanager
def cluster_with(plan: FaultPlan) -> Iterator[LocalCluster]:
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", **plan.environment}
    with LocalCluster(2, 2, env=env, restart=AT_ONCE) as cluster:
        yield cluster


def test_a_worker_is_killed_while_it_writes_gradients(tmp_path: Path) -> None:
    """Of the first vector of a step, of the second, and of a second step."""
    plan = FaultPlan(tmp_path / "plan")
    kills = [Fault(phases.WRITING_GRADIENTS, count) for count in (1, 2, 5)]
    plan.add("worker", 1, *kills)
    with cluster_with(plan) as cluster:
        training = Training(cluster.resolver)
        try:
            assert "shared memory with ps 0, 1" in training.strategy.extended.describe()
            training.run_until(
                lambda: len(plan.fired("worker", 1)) == len(kills) and is_back(plan, "worker", 1), "the kills", 300
            )
            training.check_values()
        finally:
            training.strategy.close()


@pytest.mark.parametrize(
    ("phase", "with_a_worker"),
    [
        pytest.param(phases.APPLIED, False, marks=pytest.mark.soak),
        pytest.param(phases.WRITING_VALUES, False, marks=pytest.mark.soak),
        (phases.WRITING_VALUES, True),
    ],
    ids=["applied", "half written", "half written, and a worker"],
)
def test_a_server_is_killed_while_a_worker_waits_for_values(tmp_path: Path, phase: str, with_a_worker: bool) -> None:
    plan = FaultPlan(tmp_path / "plan")
    plan.add("ps", 0, Fault(phase, 15))
    if with_a_worker:
        plan.add("worker", 1, Fault(phases.WRITING_GRADIENTS, 9))
    with cluster_with(plan) as cluster:
        cluster.wait_until_listening()
        training = LeasedTraining(cluster, tmp_path)
        try:
            training.run(lambda step: None)
            assert [line.fault.phase for line in plan.fired("ps", 0) if line.fault] == [phase]
            assert len(plan.fired("worker", 1)) == with_a_worker
            assert training.restored
            for vector in training.counts():
                assert torch.equal(vector, torch.full_like(vector, EPOCHS))
        finally:
            training.close()


def test_a_torn_parameter_is_read_again(tmp_path: Path) -> None:
    """A server that dies half-way leaves half of the values in the worker's parameters; no function sees them."""
    plan = FaultPlan(tmp_path / "plan")
    with cluster_with(plan) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        try:
            with strategy.scope():
                first, second = (torch.nn.Parameter(torch.zeros(4096)) for _ in range(2))
                third = torch.nn.Parameter(torch.zeros(4096))
                optimizer = torch.optim.SGD([first, second, third], lr=1.0)
            coordinator = ts.ClusterCoordinator(strategy)

            def step(may_step: bool) -> list[float]:
                values = [float(tensor.max()) for tensor in (first, second, third)]
                if may_step:
                    optimizer.zero_grad()
                    (-(first + second + third).sum()).backward()
                    optimizer.step()
                return values

            coordinator.schedule(step, (True,)).get(PATIENCE_SECONDS)
            checkpoint = ts.Checkpoint(first=_Holder(first, second, third), optimizer=optimizer)
            checkpoint.save(tmp_path / "saved")
            plan.add("ps", 0, Fault(phases.WRITING_VALUES))
            with pytest.raises(ts.errors.ParameterServerUnavailable):
                coordinator.schedule(step, (True,)).get(PATIENCE_SECONDS)
            with pytest.raises(ts.errors.ParameterServerUnavailable):
                coordinator.join(PATIENCE_SECONDS)
            checkpoint.restore(tmp_path / "saved")
            results = [coordinator.schedule(step, (False,)) for _ in range(6)]
            assert coordinator.fetch(results) == [[1.0, 1.0, 1.0]] * 6
        finally:
            strategy.close()


class _Holder(torch.nn.Module):
    def __init__(self, *parameters: torch.nn.Parameter) -> None:
        super().__init__()
        self.parameters_of_the_test = torch.nn.ParameterList(parameters)
