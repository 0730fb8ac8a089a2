"""Buffers that a program replaces by assignment are the variables that they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.testing.fake_cluster import FakeCluster


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1, bias=False)
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("whole", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replaced = self.replaced + 1
        self.in_place += 1
        self.whole = self.whole + 1
        return self.inner(x)

    def counts(self) -> list[float]:
        state = self.state_dict()
        return [state[name].item() for name in ("replaced", "in_place", "whole")]


@pytest.fixture(params=[1, 2], ids="{} workers".format)
def job(request) -> Iterator[tuple[ts.ClusterCoordinator, Counting]]:
    with FakeCluster(workers=request.param, ps=2) as cluster:
        strategy = cluster.strategy()
        with strategy.scope():
            model = nn.Sequential(Counting())
        yield ts.ClusterCoordinator(strategy), model[0]


def call(coordinator: ts.ClusterCoordinator, model: nn.Module, times: int) -> None:
    for _ in range(times):
        coordinator.schedule(lambda: float(model(torch.ones(1, 2)).detach())).get(timeout=30)


def test_functions_replace_buffers(job) -> None:
    coordinator, model = job
    call(coordinator, model, 5)
    assert model.counts() == [5, 5, 5]
    call(coordinator, model, 5)
    assert model.counts() == [10, 10, 10]


def test_the_coordinator_replaces_buffers(job) -> None:
    coordinator, model = job
    model.replaced = torch.tensor(7.0)  # as often written to as the one that it replaces: never
    call(coordinator, model, 1)
    assert model.counts() == [8, 1, 1]
    model.replaced = torch.tensor(20.0)
    model.whole = torch.tensor(30)
    call(coordinator, model, 1)
    assert model.counts() == [21, 2, 31]


def test_a_buffer_that_is_replaced_twice_may_have_the_address_of_the_first(job) -> None:
    coordinator, model = job
    model.replaced = torch.tensor(1.0)
    call(coordinator, model, 1)
    coordinator.schedule(lambda: 0).get(timeout=30)
    first = id(model.replaced)
    for value in range(100, 200):
        model.replaced = torch.tensor(float(value))
        if id(model.replaced) == first:
            break
    call(coordinator, model, 1)
    assert model.counts()[0] == value + 1
