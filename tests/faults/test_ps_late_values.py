"""Fresh values that are still being written while the next function runs: who waits, and what a fault leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS, wait_until
from torchstrat.launch import LocalCluster
from torchstrat.launch.restarts import RestartPolicy
from torchstrat.parameter_server.worker import phases
from torchstrat.parameter_server.worker.arrivals import SWITCH
from torchstrat.testing.fault_plan import Fault, FaultPlan

WIDTHS = (512, 4096, 512)  # 8 MiB each
VALUES_BEFORE_THE_SECOND_LAYER = 3  # the biases, and the first weight
STEPS = 6

pytestmark = [
    pytest.mark.deadline(420),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name is Linux's"),
    pytest.mark.filterwarnings("ignore:.*was not saved:UserWarning"),
]


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.ReLU(), nn.Linear(WIDTHS[1], WIDTHS[2]))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(step))


def plain_losses() -> list[float]:
    model, optimizer = make()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (model(batch(step)) - batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Training:
    """One worker, one server."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.strategy = ts.ParameterServerStrategy(cluster.resolver)
        with self.strategy.scope():
            self.model, self.optimizer = make()
        self.coordinator = ts.ClusterCoordinator(self.strategy)
        self.folder = folder

    def schedule(self, step: int) -> ts.RemoteValue:
        model, optimizer, folder = self.model, self.optimizer, str(self.folder)

        def train(step: int) -> dict[str, Any]:
            at_the_beginning = type(model[2].weight).__name__
            optimizer.zero_grad()
            hidden = model[1](model[0](batch(step)))
            open(f"{folder}/{step} has computed its first layer", "w").close()
            loss = (model[2](hidden) - batch(step)).square().mean()
            afterwards = type(model[2].weight).__name__
            loss.backward()
            optimizer.step()
            return {"loss": loss.item(), "classes": (at_the_beginning, afterwards)}

        return self.coordinator.schedule(train, (step,))

    def has_computed_its_first_layer(self, step: int) -> bool:
        return (self.folder / f"{step} has computed its first layer").exists()


@contextmanager
def training_with(plan: FaultPlan, folder: Path, overlap: str = "on") -> Iterator[tuple[LocalCluster, Training]]:
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", SWITCH: overlap, **plan.environment}
    with LocalCluster(1, 1, env=env, restart=RestartPolicy(first_delay_seconds=0.0)) as cluster:
        training = Training(cluster, folder)
        try:
            yield cluster, training
        finally:
            training.strategy.close()


def wait_until_it_happened(plan: FaultPlan) -> int:
    """The server's process."""
    wait_until(lambda: bool(plan.fired("ps", 0)), "what the server was to do")
    return plan.fired("ps", 0)[0].pid


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_the_next_function_computes_with_the_first_layers(tmp_path: Path, overlap: str) -> None:
    """The server is stopped when it has written the first layer, and goes on when the next function has used it."""
    plan = FaultPlan(tmp_path / "plan")
    plan.add("ps", 0, Fault(phases.WRITING_VALUES, VALUES_BEFORE_THE_SECOND_LAYER, "SIGSTOP"))
    with training_with(plan, tmp_path, overlap) as (_, training):
        results = [training.schedule(step) for step in range(STEPS)]
        server = wait_until_it_happened(plan)
        try:
            if overlap == "on":
                wait_until(lambda: training.has_computed_its_first_layer(1), "the use of the first layer")
            else:
                with pytest.raises(TimeoutError):
                    wait_until(lambda: training.has_computed_its_first_layer(1), "what it must not do", seconds=3.0)
        finally:
            os.kill(server, signal.SIGCONT)
        found = training.coordinator.fetch(results)
        assert [one["loss"] for one in found] == plain_losses()
        classes = ("ArrivingParameter" if overlap == "on" else "WatchedParameter", "WatchedParameter")
        assert found[1]["classes"] == classes


def test_a_server_is_killed_while_the_next_function_waits_for_a_layer(tmp_path: Path) -> None:
    """The function fails, naming the server; after a restore nothing of the half-written values is seen."""
    plan = FaultPlan(tmp_path / "plan")
    with training_with(plan, tmp_path) as (_, training):
        first = training.schedule(0).get(PATIENCE_SECONDS)
        training.coordinator.join(PATIENCE_SECONDS)
        checkpoint = ts.Checkpoint(model=training.model, optimizer=training.optimizer)
        checkpoint.save(tmp_path / "saved")
        plan.add("ps", 0, Fault(phases.WRITING_VALUES, VALUES_BEFORE_THE_SECOND_LAYER, "SIGSTOP"))
        results = [training.schedule(step) for step in (1, 2, 3)]
        server = wait_until_it_happened(plan)
        wait_until(lambda: training.has_computed_its_first_layer(2), "the use of the first layer")
        os.kill(server, signal.SIGKILL)
        with pytest.raises(ts.errors.ParameterServerUnavailable, match="parameter server 0"):
            results[1].get(PATIENCE_SECONDS)
        with pytest.raises(ts.errors.ParameterServerUnavailable):
            training.coordinator.join(PATIENCE_SECONDS)
        checkpoint.restore(tmp_path / "saved")
        rest = training.coordinator.fetch([training.schedule(step) for step in range(1, STEPS)])
        assert [first["loss"], *(one["loss"] for one in rest)] == plain_losses()
