"""What a run learns: the loss that it trains on, how its outputs are judged, and the one training step, which the
synchronous and the asynchronous loop both run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchstrat.config import ExperimentConfig
from torchstrat.experiments import targets
from torchstrat.experiments.data import Examples
from torchstrat.experiments.scores import Loss, Meter

Batch = tuple[Any, torch.Tensor]
"""Inputs, a tensor or a nest of tensors as the model takes them, and labels."""


@dataclass(frozen=True)
class Objective:
    """Has no state, and travels with the functions that use it."""

    loss: Loss
    new_meter: Callable[[Loss], Meter]

    def meter(self) -> Meter:
        """A fresh one, for one pass over held-out rows."""
        return self.new_meter(self.loss)


def objective_of(config: ExperimentConfig, examples: Examples) -> Objective:
    """The configuration's loss, or that of the data."""
    return Objective(targets.make("loss", config.loss) if config.loss else examples.loss, examples.meter)


def step_of(
    config: ExperimentConfig, model: nn.Module, optimizer: torch.optim.Optimizer, objective: Objective
) -> Callable[[Batch], torch.Tensor]:
    """The configuration's step for ``strategy.run``, or `make_train_step`'s."""
    call = config.step or {"_target_": f"{__name__}.{make_train_step.__name__}"}
    step: Callable[[Batch], torch.Tensor] = targets.make(
        "step", call, model=model, optimizer=optimizer, loss=objective.loss
    )
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
