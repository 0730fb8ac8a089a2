"""Losses scaled by the global batch, for programs written for summed gradients."""

from __future__ import annotations

import operator
from typing import Any

import torch

from torchstrat.context import get_replica_context, get_strategy
from torchstrat.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.reduction import ReduceOp


def _require_sum(call: str) -> int:
    """The number of replicas, after checking that gradients are summed: these losses are divided already."""
    strategy = get_strategy()
    replicas = strategy.num_replicas_in_sync
    if replicas > 1 and strategy.extended.gradient_reduce_op is not ReduceOp.SUM:
        raise InvalidArgumentError(
            f"{call} divides by the global batch, and this strategy averages gradients over {replicas} replicas, which "
            f"would divide by {replicas} again. Either build the strategy with gradient_reduce_op='sum', or use a "
            "plain mean loss (torch's reduction='mean')."
        )
    return replicas


def compute_average_loss(
    per_example_loss: torch.Tensor,
    sample_weight: torch.Tensor | None = None,
    global_batch_size: int | None = None,
) -> torch.Tensor:
    """This replica's share of the mean loss over the global batch: the sum of its losses over the global batch size.

    Args:
        per_example_loss: losses of this replica's examples, shape ``(rows, …)``.
        sample_weight: weights that broadcast to ``per_example_loss`` from the left.
        global_batch_size: examples on all replicas; default: this replica's rows times the number of replicas.

    Needs ``gradient_reduce_op="sum"`` with several replicas (`ValueError` otherwise).
    """
    replicas = _require_sum("compute_average_loss")
    if get_replica_context() is None:
        raise ContextError("compute_average_loss works inside a replica; call it in the step given to strategy.run.")
    if sample_weight is not None:
        weight = torch.as_tensor(sample_weight, dtype=per_example_loss.dtype, device=per_example_loss.device)
        missing = per_example_loss.dim() - weight.dim()
        per_example_loss = per_example_loss * weight.reshape(weight.shape + (1,) * missing)
    if global_batch_size is None:
        rows = per_example_loss.shape[0] if per_example_loss.dim() else 1
        global_batch_size = rows * replicas
    examples = _whole_number(global_batch_size)
    total = per_example_loss.sum()
    return total / examples if examples else torch.zeros_like(total)


def _whole_number(global_batch_size: Any) -> int:
    try:
        examples = operator.index(global_batch_size)
    except TypeError:
        raise WrongTypeError(
            f"global_batch_size must be an int; got {type(global_batch_size).__name__} {global_batch_size!r}."
        ) from None
    if isinstance(global_batch_size, bool) or examples < 0:
        raise InvalidArgumentError(f"global_batch_size must be 0 or more examples; got {global_batch_size!r}.")
    return examples


def scale_regularization_loss(regularization_loss: Any) -> torch.Tensor:
    """A loss that every replica computes in full, divided by the number of replicas, so that their sum counts it once.

    Needs ``gradient_reduce_op="sum"`` with several replicas (`ValueError` otherwise).
    """
    replicas = _require_sum("scale_regularization_loss")
    if get_replica_context() is None:
        raise ContextError(
            "scale_regularization_loss works inside a replica; call it in the step given to strategy.run."
        )
    return torch.as_tensor(regularization_loss).sum() / replicas
