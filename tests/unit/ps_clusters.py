"""What the tests of parameter servers share: a program with data of its own, and its plain PyTorch loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from torchstrat.testing.fake_cluster import FakeCluster

ROWS, CLASSES = 20, 3


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TableNet(nn.Module):
    """A table, a bag, BatchNorm's buffers, dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, padding_idx=2)
        self.bag = nn.EmbeddingBag(ROWS, 4, mode="sum")
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.table(ids).mean(1) + self.bag(ids)))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.out = nn.Linear(7, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.first(F.one_hot(ids % 5, 5).double().mean(1))))


def batch_of(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randint(0, rows, (8, 3), generator=generator),
        torch.randint(0, CLASSES, (8,), generator=generator),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    ids, labels = batch_of(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(ids), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def plain_loop(
    make_model: Callable[[], nn.Module], make_optimizer: Callable[[Any], torch.optim.Optimizer], steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    losses = [train_step(model, optimizer, step).item() for step in range(steps)]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def scheduled_loop(
    cluster: FakeCluster,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    partitioner: Any = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same program on parameter servers. With one worker its functions run one after the other."""
    strategy = cluster.strategy(partitioner, rows_only=True)
    with strategy.scope():
        torch.manual_seed(0)
        model = make_model()
        optimizer = make_optimizer(model.parameters())
    coordinator = ts.ClusterCoordinator(strategy)

    def function(step: int) -> torch.Tensor:
        return strategy.run(train_step, args=(model, optimizer, step))

    results = [coordinator.schedule(function, args=(step,)) for step in range(steps)]
    coordinator.join()
    return [float(result.fetch()) for result in results], model.state_dict()


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
