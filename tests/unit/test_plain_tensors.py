"""Tensors that a step changes in place and that are in no module: replicas of one process share them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from torch import nn

import torchstrat as ts

SAYS = r"shape \(2,\).* but an average has moved once for each"


class Average:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Own(nn.Linear):
    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("average", torch.zeros(2))
        self.plain, self.held = torch.zeros(2), [self.average]
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


def _holders(tensor: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """By where a step has the tensor from: what it has it by."""
    listed, named, kept = [tensor], {"average": tensor}, Average(tensor)
    return {
        "closure": lambda: tensor,
        "list": lambda: listed[0],
        "dictionary": lambda: named["average"],
        "object": lambda: kept.tensor,
    }


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def replica() -> ts.ReplicaContext:
    context = ts.get_replica_context()
    assert context is not None
    return context


def _run(find: Callable[[], torch.Tensor], strategy: ts.Strategy, runs: int = 1) -> None:
    def step() -> None:
        with torch.no_grad():
            find().mul_(0.5).add_(1.0)

    for _ in range(runs):
        strategy.run(step)


@pytest.mark.parametrize("where", _holders(torch.zeros(2)))
@pytest.mark.parametrize("make", [ts.MirroredStrategy, ts.CentralStorageStrategy])
def test_each_replica_has_changed_it_and_a_warning_says_so_once(make: Callable[..., ts.Strategy], where: str) -> None:
    tensor = torch.zeros(2)
    with closing(make(["cpu:0", "cpu:1"])) as strategy:
        with pytest.warns(UserWarning, match=SAYS):
            _run(_holders(tensor)[where], strategy)
        assert tensor.tolist() == [1.5, 1.5]
        with silent():
            _run(_holders(tensor)[where], strategy, runs=2)


def test_it_is_seen_in_a_later_run_and_where_replicas_meet_in_between() -> None:
    tensor = torch.zeros(2)

    def step(*, adds: bool) -> None:
        if adds:
            tensor.add_(1.0)
            replica().all_reduce("sum", torch.ones(()))

    with closing(ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])) as strategy:
        strategy.run(step, kwargs={"adds": False})
        with pytest.warns(UserWarning, match=r"shape \(2,\)"):
            strategy.run(step, kwargs={"adds": True})


ADVISED: dict[str, Callable[[Own], torch.Tensor]] = {
    "a frozen parameter": lambda module: module.frozen,
    "a buffer": lambda module: module.average,
    "a buffer in a list": lambda module: module.held[0],
    "an attribute of a module": lambda module: module.plain,
}


@pytest.mark.parametrize("what", ADVISED)
def test_what_the_warning_advises_is_changed_once(what: str) -> None:
    with closing(ts.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy, silent():
        with strategy.scope():
            module = Own()
        _run(lambda: ADVISED[what](module), strategy)
        assert ADVISED[what](module).tolist() == [1.0, 1.0]


def test_one_replica_may_change_it() -> None:
    tensor = torch.zeros(2)
    with closing(ts.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy, silent():
        strategy.run(lambda: replica().replica_id_in_sync_group == 1 and tensor.add_(1.0).sum() and None)
    with closing(ts.OneDeviceStrategy("cpu")) as strategy, silent():
        _run(lambda: tensor, strategy, runs=2)
