"""How good a run is, measured on held-out rows: sums over the replicas' batches, or every row's own output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from torchstrat.strategy import Strategy

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Outputs and labels → the mean over the batch."""


@dataclass(frozen=True)
class Scores:
    loss: float
    """Mean over the rows."""
    accuracy: float | None
    """None where labels are no classes."""
    rows: int
    auc: float | None = None
    """Area under the ROC curve, where outputs are one logit and both labels occur."""


class Meter(Protocol):
    """Collects a pass over held-out rows: `measure` in the replicas, `combine` and `add` outside, then `scores`."""

    def measure(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What one replica batch contributes. Runs in replica context, and changes nothing."""

    def combine(self, strategy: Strategy, per_replica: Any) -> torch.Tensor:
        """What the replicas' batches of a step contribute together. Every process has to call it."""

    def add(self, measured: torch.Tensor) -> None:
        """Count a contribution."""

    def scores(self) -> Scores:
        """Of all that was counted, which must be at least one row."""


class ClassMeter:
    """Sums over rows, of any mean loss. Accuracy where labels are classes: outputs ``(batch, classes, …)``, labels
    ``(batch, …)`` integers."""

    def __init__(self, loss: Loss = F.cross_entropy) -> None:
        self._loss = loss
        self._total = torch.zeros(3, dtype=torch.float64)  # sums over rows of: loss, correct, 1

    def measure(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = len(labels)
        loss = self._loss(outputs, labels) * rows
        correct = torch.full_like(loss, math.nan)
        if not labels.is_floating_point() and outputs.ndim == labels.ndim + 1:
            correct = (outputs.argmax(dim=1) == labels).sum().to(loss.dtype) * (rows / max(labels.numel(), 1))
        return torch.stack([loss, correct, torch.full_like(loss, rows)])

    def combine(self, strategy: Strategy, per_replica: Any) -> torch.Tensor:
        reduced: torch.Tensor = strategy.reduce("sum", per_replica, axis=None)
        return reduced

    def add(self, measured: torch.Tensor) -> None:
        self._total += measured.cpu()

    def scores(self) -> Scores:
        loss, correct, rows = self._total.tolist()
        return Scores(loss / rows, None if math.isnan(correct) else correct / rows, int(rows))


class ClickMeter:
    """Loss, accuracy and AUC: outputs are logits ``(batch,)``, labels ``(batch,)`` float, 0 or 1.

    AUC compares every row with every other, so all logits are kept: 8 bytes a row.
    """

    def __init__(self, loss: Loss = F.binary_cross_entropy_with_logits) -> None:
        self._loss = loss
        self._measured: list[torch.Tensor] = []

    def measure(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.stack([outputs, labels], dim=1)

    def combine(self, strategy: Strategy, per_replica: Any) -> torch.Tensor:
        gathered: torch.Tensor = strategy.gather(per_replica, axis=0)
        return gathered

    def add(self, measured: torch.Tensor) -> None:
        self._measured.append(measured.cpu())

    def scores(self) -> Scores:
        logits, labels = torch.cat(self._measured).double().unbind(dim=1)
        accuracy = ((logits > 0) == (labels > 0.5)).double().mean()
        return Scores(float(self._loss(logits, labels)), float(accuracy), len(labels), roc_auc(logits, labels))


def roc_auc(scores: torch.Tensor, labels: torch.Tensor) -> float | None:
    """The chance that a positive row scores above a negative one, a tie counting half. Exact, in O(n log n).

    By ranks (Mann and Whitney, 1947): with equal scores sharing the mean of their ranks, the ranks of the positive
    rows add up to the number of ordered pairs plus what those rows have among themselves.

    Args:
        scores: ``(rows,)``, higher meaning more likely positive.
        labels: ``(rows,)``, positive above 0.5.

    Returns:
        None where all labels are equal: there is no pair to compare.
    """
    positive = labels > 0.5
    positives = int(positive.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return None
    _, tied_group, group_sizes = torch.unique(scores, return_inverse=True, return_counts=True)  # ascending
    group_sizes = group_sizes.double()
    mean_ranks = group_sizes.cumsum(dim=0) - (group_sizes - 1) / 2  # ranks count from 1
    ranks_of_positives = float(mean_ranks[tied_group[positive]].sum())
    return (ranks_of_positives - positives * (positives + 1) / 2) / (positives * negatives)
