"""Which gradients there are when a step is made does not depend on which worker has run the functions before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.errors import UnsupportedError
from torchstrat.testing.fake_cluster import FakeCluster

FUNCTION_SECONDS = 60.0


class Branching(nn.Module):
    """Uses the second layer at odd numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_times = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, number: int) -> Any:
        x = self.always(x)
        return self.at_times(x).square().mean() if number % 2 else x.square().mean()


def zeros_first(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(x, number).backward()
    optimizer.step()


def zeros_last(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
    model(x, number).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def zeros_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    model(x, number).backward()
    optimizer.step()


def none_at_times(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
    optimizer.zero_grad(set_to_none=number == 3)
    model(x, number).backward()
    optimizer.step()


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
    model(x, number).backward()
    optimizer.step()


Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, int], None]
BATCHES = torch.randn(6, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Branching().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(workers=2, ps=2) as made:
        yield made


def trained(cluster: FakeCluster, step: Step, workers: tuple[int, ...]) -> nn.Module:
    """``workers``: who runs the functions, one after the other."""
    strategy = cluster.strategy(None, rows_only=False)
    with strategy.scope():
        model, optimizer = made()
        begun = ts.Variable(torch.tensor(0), name="begun")
    coordinator = ts.ClusterCoordinator(strategy)

    def on(worker: int, batch: torch.Tensor, number: int) -> None:
        begun.assign_add(1)
        while int(begun.read_value()) < 2 * (number + 1):  # so each worker has one
            time.sleep(0.001)
        if coordinator.get_current_worker_index() == worker:
            step(model, optimizer, batch, number)

    for number, worker in enumerate(workers):
        both = [coordinator.schedule(on, args=(worker, BATCHES[number], number)) for _ in range(2)]
        for one in both:
            one.get(FUNCTION_SECONDS)
    strategy.extended.pull()
    return model


@pytest.mark.parametrize("workers", [(0, 0, 0, 0, 0, 0), (0, 1, 0, 1, 0, 1), (0, 0, 1, 1, 1, 0), (1, 1, 0, 1, 0, 0)])
@pytest.mark.parametrize("step", [zeros_first, zeros_last, zeros_by_hand, none_at_times])
def test_an_unused_layer_moves_as_on_one_device(step: Step, workers: tuple[int, ...], cluster: FakeCluster) -> None:
    plain, optimizer = made()
    for number in range(len(workers)):
        step(plain, optimizer, BATCHES[number], number)
    found = trained(cluster, step, workers)
    torch.testing.assert_close(dict(found.state_dict()), dict(plain.state_dict()), rtol=1e-10, atol=1e-10)


def edits_the_sum(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> None:
    """Of the gradients of two functions."""
    model(x, 1).backward()
    if number % 2:
        for p in model.parameters():
            p.grad = p.grad + 0.01 * p.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("workers", [(0, 1), (0, 0, 0, 1)])
def test_a_sum_of_which_a_part_is_elsewhere_is_not_computed_with(
    workers: tuple[int, ...], cluster: FakeCluster
) -> None:
    with pytest.raises(UnsupportedError, match="that an earlier function left on a worker"):
        trained(cluster, edits_the_sum, workers)


def test_what_a_step_has_used_is_refused_on_every_worker(cluster: FakeCluster) -> None:
    """One device would add to it."""
    with pytest.raises(UnsupportedError, match="that an earlier function left on a worker"):
        trained(cluster, nothing, (0, 1))
