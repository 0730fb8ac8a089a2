"""What a run learns: the loss that it trains on, the one training step, which the synchronous and the asynchronous
loop both run, and how outputs are judged on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from torchstrat.config import ExperimentConfig
from torchstrat.experiments import targets
from torchstrat.experiments.data import Examples, Loss

Batch = tuple[Any, torch.Tensor]
"""Inputs, a tensor or a nest of tensors as the model takes them, and labels."""


def loss_of(config: ExperimentConfig, examples: Examples) -> Loss:
    """The configuration's loss, or that of the data."""
    loss: Loss = targets.make("loss", config.loss) if config.loss else examples.loss
    return loss


def step_of(
    config: ExperimentConfig, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss
) -> Callable[[Batch], torch.Tensor]:
    """The configuration's step for ``strategy.run``, or `make_train_step`'s."""
    call = config.step or {"_target_": f"{__name__}.{make_train_step.__name__}"}
    step: Callable[[Batch], torch.Tensor] = targets.make("step", call, model=model, optimizer=optimizer, loss=loss)
    return step


def make_train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Callable[[Batch], torch.Tensor]:
    """The README's step: a batch → the mean loss before the update."""

    def train_step(batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        optimizer.zero_grad()
        value = loss(model(inputs), labels)
        value.backward()
        optimizer.step()
        return value.detach()

    return train_step


def measure(loss: Loss, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sums over a batch's rows, of: the loss, right answers, 1.

    Answers are right or wrong where labels are classes, else nan: outputs ``(batch, classes, …)``, labels
    ``(batch, …)`` integers.
    """
    rows = len(labels)
    total = loss(outputs, labels) * rows
    correct = torch.full_like(total, math.nan)
    if not labels.is_floating_point() and outputs.ndim == labels.ndim + 1:
        correct = (outputs.argmax(dim=1) == labels).sum().to(total.dtype) * (rows / max(labels.numel(), 1))
    return torch.stack([total, correct, torch.full_like(total, rows)])


def scores_of(measured: torch.Tensor) -> dict[str, Any]:
    """``loss`` and ``accuracy`` in the mean over the ``rows``, of which there must be one; no ``accuracy`` is None.

    ``measured``: what `measure` returned, summed over all batches.
    """
    loss, correct, rows = measured.tolist()
    return {"loss": loss / rows, "accuracy": None if math.isnan(correct) else correct / rows, "rows": round(rows)}


def score(model: nn.Module, batches: Iterable[Batch], loss: Loss) -> dict[str, Any]:
    """`scores_of` a model that is whole in this process."""
    measured = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for inputs, labels in batches:
            measured += measure(loss, model(inputs), labels)
    return scores_of(measured)
