"""Losses over the global batch: means over labels that replicas have different numbers of, and shares of a mean."""

from __future__ import annotations

import operator
from typing import Any

import torch

from torchstrat.core.context import get_replica_context, get_strategy
from torchstrat.core.errors import ContextError, InvalidArgumentError, WrongTypeError
from torchstrat.core.reduction import ReduceOp


def global_mean(total: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
    """The mean of a loss over the global batch, where replicas do not count alike: labels, tokens, class weights.

    With ``ignore_index`` or class weights a replica's mean loss divides by what that replica has, and the mean of such
    means is not the global one. Sum the losses and what they are divided by instead::

        total = F.cross_entropy(scores, labels, ignore_index=0, reduction="sum")
        loss = ts.global_mean(total, (labels != 0).sum())        # the same number on every replica
        loss.backward()

    Args:
        total: the sum of this replica's losses, a differentiable scalar.
        count: what it is to be divided by: this replica's number of labels, or the sum of their weights.

    Every replica has to call it. The gradients are those of one device on the global batch, with averaged gradients
    (whatever weights replicas have, but for 0) as with summed ones. 0 where nobody has anything to count.
    """
    replica = get_replica_context()
    if replica is None:
        raise ContextError("global_mean works inside a replica; call it in the step given to strategy.run.")
    if not isinstance(total, torch.Tensor):
        raise WrongTypeError(
            f"global_mean needs the sum of this replica's losses, a tensor; got {_shown(total)}. Pass what the loss "
            "returned with reduction='sum'."
        )
    own = torch.as_tensor(count, dtype=total.dtype, device=total.device).detach()
    if own.shape != total.shape:
        if own.numel() != 1:
            raise InvalidArgumentError(
                f"global_mean divides a total of shape {tuple(total.shape)} by one number, how much this replica has "
                f"to count, or by a number for each; got {_shown(count)}. Write count.sum(), or len(count)."
            )
        own = own.reshape(())
    is_sum = replica.num_replicas_in_sync > 1 and replica.strategy.extended.gradient_reduce_op is ReduceOp.SUM
    everyone, counted = replica.all_reduce(ReduceOp.SUM, [total.detach() if is_sum else total, own])
    divisor = torch.where(counted == 0, 1.0, counted)
    mean: torch.Tensor = everyone / divisor
    if not is_sum:
        return mean
    share = total / divisor  # what is left to the sum of the replicas' gradients
    return share + (mean - share).detach()


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.80}"


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
        sample_weight: weights that broadcast to ``per_example_loss`` from the left; of one dimension more, the last of
            size 1, as in TensorFlow: ``(rows, 1)`` for losses ``(rows,)``.
        global_batch_size: examples on all replicas; default: this replica's rows times the number of replicas.

    Needs ``gradient_reduce_op="sum"`` with several replicas (`ValueError` otherwise).
    """
    replicas = _require_sum("compute_average_loss")
    if get_replica_context() is None:
        raise ContextError("compute_average_loss works inside a replica; call it in the step given to strategy.run.")
    if not isinstance(per_example_loss, torch.Tensor):
        raise WrongTypeError(
            "compute_average_loss needs a tensor of losses, one for each row (reduction='none'); got "
            f"{_shown(per_example_loss)}."
        )
    if sample_weight is not None:
        per_example_loss = per_example_loss * _weights_like(per_example_loss, sample_weight)
    if global_batch_size is None:
        rows = per_example_loss.shape[0] if per_example_loss.dim() else 1
        global_batch_size = rows * replicas
    examples = _whole_number(global_batch_size)
    total = per_example_loss.sum()
    return total / examples if examples else torch.zeros_like(total)


def _weights_like(losses: torch.Tensor, sample_weight: object) -> torch.Tensor:
    """In a shape whose product with the losses is of their shape."""
    weight = torch.as_tensor(sample_weight, dtype=losses.dtype, device=losses.device)
    given = tuple(weight.shape)
    if weight.dim() == losses.dim() + 1 and given[-1] == 1:
        weight = weight.squeeze(-1)
    missing = losses.dim() - weight.dim()
    weight = weight.reshape(weight.shape + (1,) * missing) if missing > 0 else weight
    if missing < 0 or any(size not in (1, rows) for size, rows in zip(weight.shape, losses.shape, strict=True)):
        raise InvalidArgumentError(
            f"compute_average_loss: a sample_weight of shape {given} does not fit losses of shape "
            f"{tuple(losses.shape)}; give one weight for each row, shape {tuple(losses.shape[:1])}, or one for all."
        )
    return weight


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


def scale_regularization_loss(regularization_loss: object) -> torch.Tensor:
    """A loss that every replica computes in full, divided by the number of replicas, so that their sum counts it once.

    Needs ``gradient_reduce_op="sum"`` with several replicas (`ValueError` otherwise).
    """
    replicas = _require_sum("scale_regularization_loss")
    if get_replica_context() is None:
        raise ContextError(
            "scale_regularization_loss works inside a replica; call it in the step given to strategy.run."
        )
    return torch.as_tensor(regularization_loss).sum() / replicas
