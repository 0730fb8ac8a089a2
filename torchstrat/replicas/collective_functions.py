"""`all_reduce` and `all_gather` as differentiable functions of nests of tensors, whatever the engine below.

What a strategy minimises is the weighted mean of the replicas' losses (or their sum), and the engine applies a
replica's weight after its backward pass. A gradient that comes over from another replica must therefore bring that
one's weight in place of this one's: it is multiplied before it leaves and divided by the receiver's where it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchstrat.core import nest
from torchstrat.core.errors import WrongTypeError
from torchstrat.core.reduction import ReduceOp, as_tensor

Exchange = Callable[..., Any]


class AllReduce(torch.autograd.Function):
    """Combines tensors over replicas; backward combines the incoming gradients, by weight, with the same operation."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, op: ReduceOp, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.op = exchange, op
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(exchange(op, [tensor.detach() for tensor in tensors]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *_combined_by_weight(ctx.exchange.__self__, ctx.op, gradients))


class AllGather(torch.autograd.Function):
    """Joins tensors over replicas; backward sums the incoming gradients, by weight, and cuts out the own part."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, axis: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined, parts = exchange(axis, [tensor.detach() for tensor in tensors])
        ctx.exchange, ctx.axis, ctx.parts = exchange, axis, parts
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        combined = _combined_by_weight(ctx.exchange.__self__, ReduceOp.SUM, gradients)
        own = [g.narrow(ctx.axis, start, size) for g, (start, size) in zip(combined, ctx.parts, strict=True)]
        return (None, None, *own)


def _combined_by_weight(engine: Any, op: ReduceOp, gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What arrives here of the replicas' gradients, for a replica whose own weight is applied later."""
    weight = 1.0 if engine.gradient_op is ReduceOp.SUM else engine.relative_weight()
    if weight == 0.0:  # it sends nothing: its own may be nan, which no factor makes 0
        sent: Sequence[torch.Tensor] = [torch.zeros_like(gradient) for gradient in gradients]
    else:
        sent = gradients if weight == 1.0 else [gradient * weight for gradient in gradients]
    combined: list[torch.Tensor] = list(AllReduce.apply(engine.exchange_all_reduce, op, *sent))  # type: ignore[no-untyped-call]
    if weight == 1.0:
        return combined
    # Of weight 0 it has no share in the gradient, whatever arrives.
    return [gradient / weight if weight else torch.zeros_like(gradient) for gradient in combined]


def differentiable(
    function: type[torch.autograd.Function], value: object, exchange: Exchange, how: object, call: str
) -> object:
    """Apply one of the functions above to the leaves of a nest, in a single exchange."""
    tensors = [as_tensor(leaf, call) for leaf in nest.leaves(value)]
    if not tensors:
        return value
    for tensor in tensors:
        if tensor.dtype == torch.bool and function is AllReduce:
            raise WrongTypeError(
                f"{call} cannot combine bool tensors; convert them to an integer or floating dtype first."
            )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        exchange.__self__.span_replicas()  # type: ignore[attr-defined]
    return nest.unflatten(value, list(function.apply(exchange, how, *tensors)))
