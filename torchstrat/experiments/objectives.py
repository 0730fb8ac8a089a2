"""What a run learns: the loss that it trains on, and how its outputs are judged. Chosen by the data.

`train_step` is the README's, and the only one: the synchronous and the asynchronous loop both run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from torchstrat.experiments.click_logs import ClickExamples
from torchstrat.experiments.data import AnyExamples
from torchstrat.experiments.scores import ClassMeter, ClickMeter, Meter

Batch = tuple[Any, torch.Tensor]
"""Inputs, a tensor or a nest of tensors as the model takes them, and labels."""


class Objective(Protocol):
    """Has no state, and travels with the functions that use it."""

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean over the batch."""

    def meter(self) -> Meter:
        """A fresh one, for one pass over held-out rows."""


class Classification:
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, labels)

    def meter(self) -> Meter:
        return ClassMeter()


class ClickPrediction:
    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(outputs, labels)

    def meter(self) -> Meter:
        return ClickMeter()


def objective_of(examples: AnyExamples) -> Objective:
    return ClickPrediction() if isinstance(examples, ClickExamples) else Classification()


def make_train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, objective: Objective
) -> Callable[[Batch], torch.Tensor]:
    """The step for ``strategy.run``: a batch → the mean loss before the update."""

    def train_step(batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = objective.loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step
