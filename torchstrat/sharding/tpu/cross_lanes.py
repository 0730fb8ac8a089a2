"""What replicas do together inside a step, as functions of the tensors of all lanes, with their gradients.

What is minimised is the weighted mean of the replicas' losses: a gradient that comes over from another replica brings
that one's weight. Below, the losses are weighted before anything flows, so it has it already. A replica of weight 0 has
no share in the gradient, neither of its own nor of what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrat.core.reduction import ReduceOp, gather_components
from torchstrat.sharding.tpu.backward import LaneWeights
from torchstrat.sharding.tpu.lanes import Lanes

Factors = Callable[[torch.Tensor], torch.Tensor | None]
"""From a gradient ``[lanes, …]`` to the lanes' factors in a shape that broadcasts; None where all are equal."""


class _Leave(torch.autograd.Function):
    """Identity; gradients that come back to lanes of weight 0 end there."""

    @staticmethod
    def forward(ctx: Any, stacked: torch.Tensor, factors: Factors) -> torch.Tensor:
        ctx.factors = factors
        return stacked.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _of_counting(gradient, ctx.factors(gradient)), None


class _Arrive(torch.autograd.Function):
    """One tensor to every lane; the lanes' gradients are added, but for those of weight 0."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, lanes: int, factors: Factors) -> torch.Tensor:
        ctx.factors = factors
        return value.unsqueeze(0).expand(lanes, *value.shape).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _of_counting(gradient, ctx.factors(gradient)).sum(dim=0), None, None


def _of_counting(gradient: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    return gradient if factors is None else torch.where(factors > 0, gradient, 0.0)


class CrossLanes:
    """Collective operations of one pass. All of it is called outside of the level."""

    def __init__(self, lanes: Lanes, weights: LaneWeights) -> None:
        self._lanes, self._weights = lanes, weights

    def _factors(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._weights.are_equal and self._lanes.all_active:
            return None  # the same number everywhere, and out again
        return self._weights.factors(gradient)

    def arrive(self, value: torch.Tensor) -> torch.Tensor:
        """``[lanes, …]``: what was combined, for each lane."""
        arrived: torch.Tensor = _Arrive.apply(value, self._lanes.count, self._factors)  # type: ignore[no-untyped-call]
        return arrived

    def active(self, stacked: torch.Tensor) -> torch.Tensor:
        """``[active lanes, …]``, on its way to where lanes are combined."""
        if stacked.requires_grad:
            stacked = _Leave.apply(stacked, self._factors)  # type: ignore[no-untyped-call]
        return self.only_active(stacked)

    def only_active(self, stacked: torch.Tensor) -> torch.Tensor:
        """The same for gradients that keep their factors, as those of one global batch do."""
        self._weights.are_crossed |= stacked.requires_grad
        return self.of_active(stacked)

    def of_active(self, stacked: torch.Tensor) -> torch.Tensor:
        """``[active lanes, …]``."""
        if self._lanes.all_active:
            return stacked
        first = self._lanes.active[0]
        if self._lanes.active == tuple(range(first, first + len(self._lanes.active))):
            return stacked[first : first + len(self._lanes.active)]
        return stacked[list(self._lanes.active)]


def all_reduce(op: ReduceOp, active: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum or mean over the replicas of all passes; ``[active lanes, …]`` of each pass."""
    rows = active[0] if len(active) == 1 else torch.cat(list(active))
    if op is ReduceOp.SUM:
        return rows.sum(dim=0, dtype=rows.dtype)
    is_number = rows.is_floating_point() or rows.is_complex()
    return rows.mean(dim=0, dtype=None if is_number else torch.get_default_dtype())


def all_gather(axis: int, replicas: Sequence[Sequence[int]], active: Sequence[torch.Tensor]) -> torch.Tensor:
    """The replicas' tensors joined along ``axis``, in replica order, from ``[active lanes, …]`` of each pass."""
    own = {
        replica: tensor
        for ids, rows in zip(replicas, active, strict=True)
        for replica, tensor in zip(ids, rows.unbind(0), strict=True)
    }
    joined: torch.Tensor = gather_components([own[replica] for replica in sorted(own)], axis, "all_gather")
    return joined
