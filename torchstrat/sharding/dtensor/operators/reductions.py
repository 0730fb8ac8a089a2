"""Sums, means, extremes, variances and norms over dimensions. What is cut along a reduced dimension is put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchstrat.core._torch_private import foreach_norm
from torchstrat.core.half_precision import HALF, widen
from torchstrat.sharding.dtensor.cut_tensors import CutTensor
from torchstrat.sharding.dtensor.devices import Cut
from torchstrat.sharding.dtensor.operators.rules import Call, dims_of, rule, shape_of


def axes_within(call: Call, tensor: torch.Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    """The axes that cut a dimension among ``dims``."""
    return tuple(axis for axis, dim in enumerate(call.cut(tensor)) if dim in dims)


def cut_after(call: Call, tensor: torch.Tensor, dims: Sequence[int], keepdim: bool) -> Cut:
    """Of what is left of ``tensor`` when ``dims`` have been reduced."""

    def left(dim: int | None) -> int | None:
        if dim is None or dim in dims:
            return None
        return dim if keepdim else dim - sum(one < dim for one in dims)

    return tuple(left(dim) for dim in call.cut(tensor))


def size_over(tensor: torch.Tensor, dims: Sequence[int]) -> int:
    return math.prod(shape_of(tensor)[dim] for dim in dims)


def root(powers: torch.Tensor, degree: float) -> torch.Tensor:
    """The ``degree``-th; where it is 0 its gradient is 0, as those of PyTorch's norms and deviations are."""
    is_zero = powers == 0
    return torch.where(is_zero, powers, torch.where(is_zero, 1, powers).pow(1 / degree))


@rule("sum")
def total(
    call: Call, input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = dims_of(dim, len(shape_of(input)))
    part = torch.sum(call.open(input), dims, keepdim, dtype=dtype)
    return call.leave(call.added_up(part, axes_within(call, input, dims)), cut_after(call, input, dims, keepdim))


@rule("mean")
def mean(
    call: Call, input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = dims_of(dim, len(shape_of(input)))
    axes, cut, local = axes_within(call, input, dims), cut_after(call, input, dims, keepdim), call.open(input)
    if not axes:
        return call.leave(torch.mean(local, dims, keepdim, dtype=dtype), cut)
    if not (dtype or local.dtype).is_floating_point:
        raise call.refused("takes floating numbers")
    kind = dtype or local.dtype
    sums = torch.sum(local, dims, keepdim, dtype=torch.float32 if kind in HALF else kind)
    return call.leave((call.added_up(sums, axes) / size_over(input, dims)).to(kind), cut)


@rule("amax", "amin")
def extreme(call: Call, input: torch.Tensor, dim: Any = (), keepdim: bool = False) -> torch.Tensor:
    dims = dims_of(dim, len(shape_of(input)))
    axes, cut, local = axes_within(call, input, dims), cut_after(call, input, dims, keepdim), call.open(input)
    if not axes:
        return call.leave(call.function(local, dims, keepdim), cut)
    sign = 1 if call.name == "amax" else -1
    with torch.no_grad():
        highest = call.largest((local * sign).amax(dims, keepdim=True), axes) * sign
        ties = local == highest
        count = call.devices.summed(ties.sum(dims, keepdim=True), axes)
    if not local.requires_grad:
        return call.leave(highest if keepdim else highest.squeeze(dims), cut)
    # The gradient goes to all that are the largest, in equal shares, wherever they are. Their mean has that gradient,
    # and a correction without one makes the value what it is to the last bit.
    share = torch.where(ties, local, torch.zeros_like(local)).sum(dims, keepdim=True)
    result = call.added_up(share, axes) / count
    result = result + (highest - result).detach()
    return call.leave(result if keepdim else result.squeeze(dims), cut)


@rule("max", "min")
def all_of(call: Call, input: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Of all elements; of two tensors it is ``maximum`` or ``minimum``. With ``dim`` there are indices too."""
    if not args and not kwargs:
        of_extreme = Call(torch.amax if call.name == "max" else torch.amin, call.devices)
        return extreme(of_extreme, input)
    raise call.refused("knows only max() and min() over all elements; use amax, amin, maximum or minimum")


@rule("var", "std")
def variance(
    call: Call,
    input: torch.Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> torch.Tensor:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    dims = dims_of(dim, len(shape_of(input)))
    axes, cut, local = axes_within(call, input, dims), cut_after(call, input, dims, keepdim), call.open(input)
    if not axes:
        return call.leave(call.function(local, dims, correction=correction, keepdim=keepdim), cut)
    size, kind, local = size_over(input, dims), local.dtype, widen(local)
    center = call.total(local.sum(dims, keepdim=True), axes) / size
    squares = call.added_up(torch.sum((local - center).square(), dims, keepdim), axes)
    found = squares / max(0.0, size - correction)
    return call.leave((root(found, 2) if call.name == "std" else found).to(kind), cut)


@rule("any", "all", "count_nonzero")
def counts(call: Call, input: torch.Tensor, dim: object = None, keepdim: bool = False) -> torch.Tensor:
    if isinstance(dim, list | tuple) and not dim:
        raise call.refused("over no dimension")
    dims = dims_of(dim, len(shape_of(input)))
    axes, cut, local = axes_within(call, input, dims), cut_after(call, input, dims, keepdim), call.open(input)
    hits = (local == 0) if call.name == "all" else (local != 0)
    number = hits.sum(dims, keepdim=keepdim)
    if axes:
        number = call.devices.summed(number, axes)
    if call.name == "count_nonzero":
        return call.leave(number, cut)
    return call.leave(number == 0 if call.name == "all" else number > 0, cut)


@rule(torch.linalg.vector_norm)
def vector_norm(
    call: Call, x: torch.Tensor, ord: float = 2, dim: object = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    dims = dims_of(dim, len(shape_of(x)))
    axes, cut, local = axes_within(call, x, dims), cut_after(call, x, dims, keepdim), call.open(x)
    if not axes:
        return call.leave(torch.linalg.vector_norm(local, ord, dims, keepdim, dtype=dtype), cut)
    kind, local = dtype or local.dtype, widen(local if dtype is None else local.to(dtype))
    if ord == math.inf and not local.requires_grad:
        return call.leave(call.largest(local.abs().amax(dims, keepdim=keepdim), axes).to(kind), cut)
    if abs(ord) == math.inf or ord == 0:
        raise call.refused(f"of order {ord} over a dimension that is cut")
    sizes = local.abs()
    if ord < 0:
        powers = sizes.pow(ord)
    else:  # without a power of 0, whose gradient may be infinite
        is_zero = sizes == 0
        powers = torch.where(is_zero, sizes, torch.where(is_zero, 1, sizes).pow(ord))
    return call.leave(root(call.added_up(powers.sum(dims, keepdim=keepdim), axes), ord).to(kind), cut)


@rule(foreach_norm)
def norms(call: Call, tensors: Sequence[torch.Tensor], ord: float = 2, dtype: object = None) -> list[torch.Tensor]:
    """As clipping takes them of the gradients of all parameters."""
    found = []
    for tensor in tensors:
        if not isinstance(tensor, CutTensor):
            found.append(torch.linalg.vector_norm(tensor, ord, dtype=dtype))
        else:
            found.append(vector_norm(call, tensor, ord, dtype=dtype))
    return found
