"""What the parameter-server benchmark trains: model, batches and optimizer, the same for every contender.

A step is plain PyTorch (`train_step`). What differs between contenders is where the parameters are, and who applies the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]
"""The model's inputs, and what it is to predict."""

BATCHES = 8  # per worker, allocated before anything is measured, used in turn
ZIPF_EXPONENT = 1.04  # 26 × 1024 ids out of 1,000,000 name about 10,600 different rows


class Problem(Protocol):
    def model(self) -> nn.Module:
        """A new model, with values from PyTorch's generator."""

    def batches(self, seed: int) -> list[Batch]: ...

    def loss(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...


class ClickModel(nn.Module):
    """Rows of one table for all ids, and dense features, into an MLP with one output: the shape of a click model."""

    def __init__(self, table_rows: int, dim: int, ids: int, features: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.table = nn.Embedding(table_rows, dim, sparse=True)
        self.mlp = mlp(ids * dim + features, *hidden, 1)

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """``ids``: ``(batch, ids)``; ``features``: ``(batch, features)``; the result ``(batch,)`` are logits."""
        return self.from_vectors(self.table(ids), features)

    def from_vectors(self, vectors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The same from rows that were looked up already: ``vectors``: ``(batch, ids, dim)``."""
        return self.mlp(torch.cat([vectors.flatten(1), features], 1)).squeeze(1)


@dataclass(frozen=True)
class Clicks:
    """Ids by a Zipf-like law, the same for every feature; frequent ids lie anywhere in the table."""

    table_rows: int
    dim: int
    ids: int
    features: int
    hidden: tuple[int, ...]
    rows: int

    def model(self) -> ClickModel:
        return ClickModel(self.table_rows, self.dim, self.ids, self.features, self.hidden)

    def batches(self, seed: int) -> list[Batch]:
        everyones = torch.Generator().manual_seed(0)
        row_of_rank = torch.randperm(self.table_rows, generator=everyones)
        weights = torch.arange(1, self.table_rows + 1, dtype=torch.float64).pow(-ZIPF_EXPONENT)
        up_to_rank = weights.cumsum(0)
        own = torch.Generator().manual_seed(seed)
        found = []
        for _ in range(BATCHES):
            drawn = torch.rand(self.rows, self.ids, generator=own, dtype=torch.float64) * up_to_rank[-1]
            ids = row_of_rank[torch.searchsorted(up_to_rank, drawn).clamp_(max=self.table_rows - 1)]
            features = torch.randn(self.rows, self.features, generator=own)
            clicked = (torch.rand(self.rows, generator=own) < 0.25).float()
            found.append(((ids, features), clicked))
        return found

    def loss(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(predictions, targets)


@dataclass(frozen=True)
class Dense:
    """A plain MLP with ReLU and mean squared error: nothing but dense gradients."""

    widths: tuple[int, ...]
    rows: int

    def model(self) -> nn.Module:
        return mlp(*self.widths)

    def batches(self, seed: int) -> list[Batch]:
        own = torch.Generator().manual_seed(seed)
        return [
            (
                (torch.randn(self.rows, self.widths[0], generator=own),),
                torch.randn(self.rows, self.widths[-1], generator=own),
            )
            for _ in range(BATCHES)
        ]

    def loss(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(predictions, targets)


def mlp(*widths: int) -> nn.Sequential:
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Workload:
    """``problem``: None where functions that do nothing are called, instead of training."""

    title: str
    problem: Problem | None
    optimizer: str
    workers: int
    servers: int
    steps: int
    """Timed steps, or calls, of each worker in one measurement."""
    warm_up_steps: int
    one_by_one: bool = False
    """For calls: wait for each result before the next call."""
    learning_rate: float = 0.01
    different_batches: int = BATCHES
    prefetch: bool = False
    """Ask for the next batch's rows before each backward pass. Only torchstrat's program knows how."""

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer, with the same first values in every process."""
        assert self.problem is not None
        torch.manual_seed(0)
        model = self.problem.model()
        return model, self.make_optimizer(model.parameters())

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Plain ones: the rows of a table that a batch does not name stay as they are, on one device too."""
        kinds = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}
        return kinds[self.optimizer](parameters, lr=self.learning_rate)

    def batches(self, worker: int) -> list[Batch]:
        """What a worker trains on, again and again."""
        assert self.problem is not None
        return self.problem.batches(seed=worker)[: self.different_batches]


def train_step(
    problem: Problem,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    before_backward: Callable[[], None] | None = None,
) -> torch.Tensor:
    """The user's training step."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss = problem.loss(model(*inputs), targets)
    if before_backward is not None:
        before_backward()
    loss.backward()
    optimizer.step()
    return loss.detach()


def do_nothing() -> None:
    """The function that is called where calls are measured."""


_TABLE = Clicks(1_000_000, 64, ids=26, features=13, hidden=(256, 64), rows=1024)
_SMALL_TABLE = Clicks(10_000, 16, ids=4, features=13, hidden=(32, 16), rows=64)
_LAYERS = Dense((1024, 4096, 4096, 1024), rows=32)
_SMALL_LAYERS = Dense((64, 128, 128, 64), rows=8)
_A = "A: table 1,000,000 × 64, 26 skewed ids × batch 1024, MLP 1677-256-64-1"
_B = "B: MLP 1024-4096-4096-1024, batch 32"

WORKLOADS = {
    "A-sgd": Workload(f"{_A}, SGD, 2 + 2", _TABLE, "SGD", 2, 2, steps=50, warm_up_steps=10),
    "A-adagrad": Workload(f"{_A}, Adagrad, 2 + 2", _TABLE, "Adagrad", 2, 2, steps=50, warm_up_steps=10),
    "B-1+1": Workload(f"{_B}, SGD, 1 + 1", _LAYERS, "SGD", 1, 1, steps=20, warm_up_steps=4),
    "B-2+2": Workload(f"{_B}, SGD, 2 + 2", _LAYERS, "SGD", 2, 2, steps=20, warm_up_steps=4),
    "C": Workload("C: 10,000 functions that do nothing, 2 workers", None, "", 2, 1, steps=5_000, warm_up_steps=200),
    "C-one": Workload("C: one schedule and fetch at a time, 1,000 times", None, "", 1, 1, 1_000, 50, one_by_one=True),
}


def small(workload: Workload) -> Workload:
    """The same in seconds, for tests and for busy machines. Its figures mean nothing."""
    problem = {_TABLE: _SMALL_TABLE, _LAYERS: _SMALL_LAYERS, None: None}[workload.problem]
    return replace(
        workload, title=f"{workload.title}: SMALL VARIANT", problem=problem, steps=workload.steps // 10, warm_up_steps=4
    )


def for_check(workload: Workload, steps: int) -> Workload:
    """One worker from the first step on: then every contender has the losses of one device.

    On one batch, in large steps: else a loss would not show whether the rows of the table were trained.
    """
    rate = 1.0 if workload.optimizer == "SGD" else workload.learning_rate
    return replace(workload, workers=1, steps=steps, warm_up_steps=0, learning_rate=rate, different_batches=1)


def for_workers(workload: Workload, workers: int) -> Workload:
    """The same steps in total, made by another number of workers."""
    return replace(
        workload,
        title=workload.title.replace(f"{workload.workers} + {workload.servers}", f"{workers} + {workload.servers}"),
        workers=workers,
        steps=max(1, workload.steps * workload.workers // workers),
        warm_up_steps=max(2, workload.warm_up_steps * workload.workers // workers),
    )


def from_arguments(arguments: Sequence[str]) -> Workload:
    """What a contender's process is told: ``NAME [small] [prefetch] [check=STEPS | workers=NUMBER]``."""
    name, *changes = arguments
    workload = WORKLOADS[name]
    for change in changes:
        if change == "small":
            workload = small(workload)
        elif change == "prefetch":
            workload = replace(workload, prefetch=True)
        elif change.startswith("workers="):
            workload = for_workers(workload, int(change.removeprefix("workers=")))
        else:
            workload = for_check(workload, int(change.removeprefix("check=")))
    return workload
