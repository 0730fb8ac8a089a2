"""Parameters of modules made in a scope are variables wherever TensorFlow takes one, on every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.testing.fake_cluster import FakeCluster
from torchstrat.testing.fake_tpu import fake_tpu_strategy

TWO = ["cpu:0", "cpu:1"]


@pytest.fixture(params=["one device", "mirrored", "central", "parameter server", "tpu"])
def strategy(request: pytest.FixtureRequest) -> Iterator[ts.Strategy]:
    with ExitStack() as stack:
        made: ts.Strategy
        if request.param == "parameter server":
            made = stack.enter_context(FakeCluster(workers=1, ps=2)).strategy()
        else:
            made = {
                "one device": lambda: ts.OneDeviceStrategy("cpu"),
                "mirrored": lambda: ts.MirroredStrategy(TWO),
                "central": lambda: ts.CentralStorageStrategy(TWO),
                "tpu": lambda: fake_tpu_strategy(2),
            }[request.param]()
            stack.callback(made.close)
        yield made


@pytest.fixture
def layer(strategy: ts.Strategy) -> nn.Linear:
    """Its weight is ``[[1, 2]]``."""
    with strategy.scope():
        made = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            made.weight.copy_(torch.tensor([[1.0, 2.0]]))
    return made


def value(parameter: Any) -> list[list[float]]:
    return parameter.detach().cpu().tolist()  # type: ignore[no-any-return]


def test_it_is_one_variable_of_its_scope(strategy: ts.Strategy, layer: nn.Linear) -> None:
    created = strategy.extended.variable_created_in_scope
    assert created(layer.weight)
    assert not created(nn.Linear(2, 1).weight)
    with strategy.scope():
        assert created(layer.weight)
    [found] = strategy.local_results(layer.weight)
    assert found is layer.weight


def test_it_is_reduced_as_equal_everywhere_and_names_a_destination(strategy: ts.Strategy, layer: nn.Linear) -> None:
    assert value(strategy.reduce("mean", layer.weight, axis=None)) == [[1, 2]]
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(ValueError, match="the same for all of them"):
            strategy.reduce("sum", layer.weight, axis=None)
    else:
        assert value(strategy.reduce("sum", layer.weight, axis=None)) == [[1, 2]]
    values = strategy.distribute_values_from_function(lambda context: torch.ones(2))
    [found] = strategy.extended.batch_reduce_to("sum", [(values, layer.weight)])
    total = [strategy.num_replicas_in_sync] * 2
    assert value(strategy.extended.reduce_to("sum", values, layer.weight)) == value(found) == total


def test_it_is_updated_once_and_used_outside_of_the_scope(strategy: ts.Strategy, layer: nn.Linear) -> None:
    calls = []

    def add(weight: torch.Tensor, delta: float) -> torch.Tensor:
        calls.append(delta)
        return weight.add_(delta)

    strategy.extended.update(layer.weight, add, args=(10.0,))
    strategy.extended.update(layer.weight, add, kwargs={"delta": 100.0}, group=False)
    assert calls == [10.0, 100.0]
    assert value(layer.weight) == [[111, 112]]
    with strategy.scope():
        counter = ts.Variable(1.0)
    assert not ts.has_strategy()
    assert value(layer(torch.ones(1, 2))) == [[223]]
    counter.assign_add(1.0)
    assert float(counter) == 2.0
    with strategy.scope():
        assert float(counter) == 2.0
