"""`all_reduce` and `all_gather` as differentiable functions of nests of tensors, whatever the engine below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchstrat import nest
from torchstrat.errors import WrongTypeError
from torchstrat.reduction import ReduceOp, as_tensor

Exchange = Callable[..., Any]


class AllReduce(torch.autograd.Function):
    """Combines tensors over replicas; backward combines the incoming gradients with the same operation."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, op: ReduceOp, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.op = exchange, op
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(exchange(op, [tensor.detach() for tensor in tensors]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        combined = AllReduce.apply(ctx.exchange, ctx.op, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, *combined)


class AllGather(torch.autograd.Function):
    """Joins tensors over replicas; backward sums the incoming gradients and cuts out the own part."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, axis: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined, parts = exchange(axis, [tensor.detach() for tensor in tensors])
        ctx.exchange, ctx.axis, ctx.parts = exchange, axis, parts
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        engine = ctx.exchange.__self__
        combined = AllReduce.apply(engine._exchange_all_reduce, ReduceOp.SUM, *gradients)  # type: ignore[no-untyped-call]
        own = [g.narrow(ctx.axis, start, size) for g, (start, size) in zip(combined, ctx.parts, strict=True)]
        return (None, None, *own)


def differentiable(function: type[torch.autograd.Function], value: Any, exchange: Exchange, how: Any, call: str) -> Any:
    """Apply one of the functions above to the leaves of a nest, in a single exchange."""
    tensors = [as_tensor(leaf, call) for leaf in nest.leaves(value)]
    if not tensors:
        return value
    for tensor in tensors:
        if tensor.dtype == torch.bool and function is AllReduce:
            raise WrongTypeError(
                f"{call} cannot combine bool tensors; convert them to an integer or floating dtype first."
            )
    return nest.unflatten(value, list(function.apply(exchange, how, *tensors)))
