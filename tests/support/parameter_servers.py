"""Programs for clusters of threads, and how they are compared with their plain PyTorch loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from torchstrat.testing.fake_cluster import FakeCluster

WAIT, ROWS, CLASSES = 60, 20, 3


class PerTensor(torch.optim.Optimizer):
    """The base of optimizers of a script's own: ``update`` steps one parameter, in state that is its business."""

    def __init__(self, params: Any, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Parts(nn.Module):
    """A model with its optimizer."""

    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.build()
        self.double()
        self.optimizer = type(self).make_optimizer(self.parameters(), lr=0.1)

    def build(self) -> None:
        self.table = nn.Embedding(ROWS, CLASSES)

    def train_step(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, ROWS, (8, 3), generator=generator)
        labels = torch.randint(0, CLASSES, (8,), generator=generator)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self(ids), labels)
        self.go_back(loss, number)
        return loss.detach()

    def go_back(self, loss: torch.Tensor, number: int) -> None:
        loss.backward()
        self.optimizer.step()


class Tables(Parts):
    """A table with padding, a bag, BatchNorm's buffers, dense layers."""

    def build(self) -> None:
        self.table = nn.Embedding(ROWS, 4, padding_idx=2)
        self.bag = nn.EmbeddingBag(ROWS, 4, mode="sum")
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.table(ids).mean(1) + self.bag(ids)))


class Program:
    """``made`` is what ``make`` has made in the scope; ``shards``: of everything, None for no partitioner."""

    def __init__(
        self, cluster: FakeCluster, make: Callable[[], Any], shards: int | None = None, **options: Any
    ) -> None:
        self.cluster = cluster
        partitioner = ts.partitioners.FixedShardsPartitioner(shards) if shards else None
        self.strategy = cluster.strategy(partitioner, **options)
        with self.strategy.scope():
            self.made = make()
        self.coordinator = ts.ClusterCoordinator(self.strategy)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function`` returns on a worker."""
        return self.coordinator.schedule(function, args=args).get(timeout=WAIT)

    def places(self, *variables: Any) -> list[str]:
        return [self.strategy.extended.device_of(variable) for variable in variables]


@contextlib.contextmanager
def on_servers(
    make: Callable[[], Any], shards: int | None = None, *, workers: int = 1, ps: int = 2, **options: Any
) -> Iterator[Program]:
    with FakeCluster(workers=workers, ps=ps) as cluster:
        yield Program(cluster, make, shards, **options)


def states_are_close(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = 1e-9) -> None:
    """Raises AssertionError unless two ``state_dict()`` are the same but for ``tolerance``."""
    torch.testing.assert_close(dict(found), dict(wanted), rtol=0.0, atol=tolerance)
