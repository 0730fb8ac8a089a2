"""Sums, means, extremes, variances and norms over dimensions, and normalisations by them; functions along one
dimension, which have it whole: places of extremes, sorting, running sums.

What is cut along a reduced dimension is put together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from torchstrat.core._torch_private import foreach_norm
from torchstrat.core.reduction import HALF, widen
from torchstrat.core.tensor_classes import tensors_in
from torchstrat.sharding.dtensor.cut_tensors import CutTensor, shape_of
from torchstrat.sharding.dtensor.devices import Cut, cut_axes
from torchstrat.sharding.dtensor.operators.elementwise import over_elements
from torchstrat.sharding.dtensor.operators.rules import Call, Dims, dims_of, rule


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
    call: Call, input: torch.Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = dims_of(dim, len(shape_of(input)))
    part = torch.sum(call.open(input), dims, keepdim, dtype=dtype)
    return call.leave(call.added_up(part, axes_within(call, input, dims)), cut_after(call, input, dims, keepdim))


@rule("mean")
def mean(
    call: Call, input: torch.Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
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
def extreme(call: Call, input: torch.Tensor, dim: Dims = (), keepdim: bool = False) -> torch.Tensor:
    dims = dims_of(dim, len(shape_of(input)))
    axes, cut, local = axes_within(call, input, dims), cut_after(call, input, dims, keepdim), call.open(input)
    if not axes:
        return call.leave(call.function(local, dims, keepdim), cut)
    with torch.no_grad():
        highest = call.devices.largest(call.function(local, dims, keepdim=True), axes, call.function)
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


def all_of(call: Call, input: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """``max`` or ``min`` of all elements; of two tensors it is ``maximum`` or ``minimum``."""
    if not args and not kwargs:
        of_extreme = Call(torch.amax if call.name == "max" else torch.amin, call.devices)
        return extreme(of_extreme, input)
    raise call.refused(
        "knows max() and min() of all elements and along a dimension; use amax, amin, maximum or minimum"
    )


@rule("var", "std")
def variance(
    call: Call,
    input: torch.Tensor,
    dim: Dims = None,
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
    if not (local.is_floating_point() or local.is_complex()):
        raise call.refused("takes floating or complex numbers")
    size, kind, local = size_over(input, dims), local.dtype.to_real(), widen(local)
    apart = local - call.total(local.sum(dims, keepdim=True), axes) / size
    squares = (apart * apart.conj()).real if apart.is_complex() else apart.square()
    squares = call.added_up(torch.sum(squares, dims, keepdim), axes)
    found = squares / max(0.0, size - correction)
    return call.leave((root(found, 2) if call.name == "std" else found).to(kind), cut)


@rule("any", "all", "count_nonzero")
def counts(call: Call, input: torch.Tensor, dim: Dims = None, keepdim: bool = False) -> torch.Tensor:
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
    found = number == 0 if call.name == "all" else number > 0
    return call.leave(found.to(torch.uint8) if local.dtype == torch.uint8 else found, cut)


@rule(torch.linalg.vector_norm)
def vector_norm(
    call: Call,
    x: torch.Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    dims = dims_of(dim, len(shape_of(x)))
    axes, cut, local = axes_within(call, x, dims), cut_after(call, x, dims, keepdim), call.open(x)
    if not axes:
        return call.leave(torch.linalg.vector_norm(local, ord, dims, keepdim, dtype=dtype), cut)
    kind, local = (dtype or local.dtype).to_real(), widen(local if dtype is None else local.to(dtype))
    sizes = local.abs()
    if ord == math.inf and not local.requires_grad:
        return call.leave(call.largest(sizes.amax(dims, keepdim=keepdim), axes).to(kind), cut)
    if abs(ord) == math.inf:
        of_extreme = Call(torch.amax if ord > 0 else torch.amin, call.devices)
        return extreme(of_extreme, call.leave(sizes, call.cut(x)), dims, keepdim).to(kind)
    if ord == 0:
        raise call.refused(f"of order {ord} over a dimension that is cut")
    if ord < 0:
        powers = sizes.pow(ord)
    else:  # without a power of 0, whose gradient may be infinite
        is_zero = sizes == 0
        powers = torch.where(is_zero, sizes, torch.where(is_zero, 1, sizes).pow(ord))
    return call.leave(root(call.added_up(powers.sum(dims, keepdim=keepdim), axes), ord).to(kind), cut)


@rule("norm", torch.linalg.norm)
def norm(
    call: Call,
    input: torch.Tensor,
    p: float | str | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    out: None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Of vectors, and the Frobenius norm of matrices."""
    order = kwargs.get("ord", p)
    dims = dims_of(dim, len(shape_of(input)))
    is_of_matrices = call.function is torch.linalg.norm and order is not None and len(dims) == 2
    if (is_of_matrices and order != "fro") or order == "nuc":
        raise call.refused(f"of order {order!r} is one of matrices")
    return vector_norm(call, input, 2 if order in (None, "fro") else order, dim, keepdim, dtype=dtype)


@rule("normalize")
def normalize(
    call: Call, input: torch.Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> torch.Tensor:
    if input.is_complex():
        raise call.refused("takes real numbers")
    length = vector_norm(call, input, p, dim, True)
    return over_elements(Call(lambda x, size: x / size.clamp_min(eps), call.devices), (input, length), {})


@rule(foreach_norm)
def norms(
    call: Call, tensors: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """As clipping takes them of the gradients of all parameters."""
    found = []
    for tensor in tensors:
        if not isinstance(tensor, CutTensor):
            found.append(torch.linalg.vector_norm(tensor, ord, dtype=dtype))
        else:
            found.append(vector_norm(call, tensor, ord, dtype=dtype))
    return found


def _of_last_dims(call: Call, input: torch.Tensor, count: int) -> Cut:
    """How a weight with the last ``count`` dimensions of ``input`` is cut when ``input`` is."""
    offset = len(shape_of(input)) - count
    return tuple(dim - offset if dim is not None and dim >= offset else None for dim in call.cut(input))


def _scaled(normal: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is not None:
        normal = normal * weight
    return normal if bias is None else normal + bias


@rule("layer_norm")
def layer_norm(
    call: Call,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    cut, count = call.cut(input), len(normalized_shape)
    local, of_weight = call.open(input), _of_last_dims(call, input, count)
    weights = [one if one is None else call.enter(one, of_weight, cut_axes(cut)) for one in (weight, bias)]
    axes = cut_axes(of_weight)
    if not axes:
        return call.leave(functional.layer_norm(local, list(normalized_shape), weights[0], weights[1], eps), cut)
    kind = functional.layer_norm(local.new_zeros(1), [1]).dtype  # as autocast has it
    dims, size, local = tuple(range(-count, 0)), torch.Size(normalized_shape).numel(), widen(local)
    center = local - call.total(local.sum(dims, keepdim=True), axes) / size
    variance = call.total(center.square().sum(dims, keepdim=True), axes) / size
    return call.leave(_scaled(center * (variance + eps).rsqrt(), *weights).to(kind), cut)


@rule("rms_norm")
def rms_norm(
    call: Call,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    cut, count = call.cut(input), len(normalized_shape)
    local, of_weight = call.open(input), _of_last_dims(call, input, count)
    own = None if weight is None else call.enter(weight, of_weight, cut_axes(cut))
    axes = cut_axes(of_weight)
    if not axes:
        return call.leave(functional.rms_norm(local, list(normalized_shape), own, eps), cut)
    kind = functional.rms_norm(local.new_zeros(1), [1]).dtype
    dims, size, local = tuple(range(-count, 0)), torch.Size(normalized_shape).numel(), widen(local)
    mean = call.total(local.square().sum(dims, keepdim=True), axes) / size
    least = torch.finfo(local.dtype).eps if eps is None else eps
    return call.leave(_scaled(local * (mean + least).rsqrt(), own, None).to(kind), cut)


@rule("group_norm")
def group_norm(
    call: Call,
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``input``: ``(batch, channels, …)``."""
    cut, channels = call.cut(input), shape_of(input)[1]
    parts = call.devices.axes.parts(cut, 1)
    if num_groups % parts:
        raise call.refused(f"has {num_groups} groups, and its channels are cut into {parts} parts: a group lies on two")
    local = call.open(input)
    of_weight = tuple(0 if dim == 1 else None for dim in cut)
    weights = [one if one is None else call.enter(one, of_weight, cut_axes(cut)) for one in (weight, bias)]
    axes = tuple(axis for axis, dim in enumerate(cut) if dim is not None and dim >= 2)
    groups = num_groups // parts
    if not axes:
        return call.leave(functional.group_norm(local, groups, weights[0], weights[1], eps), cut)
    kind = functional.group_norm(local.new_zeros(1, 1, 2), 1).dtype
    size, local = channels // num_groups * shape_of(input)[2:].numel(), widen(local)
    grouped = local.reshape(local.shape[0], groups, -1)
    center = grouped - call.total(grouped.sum(-1, keepdim=True), axes) / size
    variance = call.total(center.square().sum(-1, keepdim=True), axes) / size
    normal = (center * (variance + eps).rsqrt()).reshape(local.shape)
    shape = (1, -1, *[1] * (local.ndim - 2))
    return call.leave(_scaled(normal, *[one if one is None else one.view(shape) for one in weights]).to(kind), cut)


@rule(functional.batch_norm)
def batch_norm(
    call: Call,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``input``: ``(batch, channels, …)``. Statistics are the replica's, over all of its logical devices."""
    cut = call.cut(input)
    if 1 in cut:
        raise call.refused("is cut along its channels")
    statistics = [one for one in (running_mean, running_var) if one is not None]
    if any(call.cut(one) != call.devices.axes.whole or one.requires_grad for one in statistics):
        raise call.refused("has statistics that are cut, or that require a gradient")
    local, varying = call.open(input), cut_axes(cut)
    weights = [one if one is None else call.enter(one, call.devices.axes.whole, varying) for one in (weight, bias)]
    if not training or not local.numel():  # of no rows there are no statistics
        return call.leave(
            functional.batch_norm(local, running_mean, running_var, weights[0], weights[1], training, momentum, eps),
            cut,
        )
    dims, shape = (0, *range(2, local.ndim)), (1, -1, *[1] * (local.ndim - 2))
    size, kind, local = shape_of(input).numel() // shape_of(input)[1], local.dtype, widen(local)
    mean = call.total(local.sum(dims), varying) / size
    center = local - mean.view(shape)
    variance = call.total(center.square().sum(dims), varying) / size
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
            running_var.lerp_((variance.detach() * (size / (size - 1))).to(running_var.dtype), momentum)
    normal = center * (variance.view(shape) + eps).rsqrt()
    return call.leave(_scaled(normal, *[one if one is None else one.view(shape) for one in weights]).to(kind), cut)


_DIMS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("argmax", "argmin", "cumprod", "cumsum", "logcumsumexp", "prod"), (0, None)),
    **dict.fromkeys(("argsort", "glu", "sort"), (0, -1)),
    **dict.fromkeys(("kthvalue", "topk"), (1, -1)),
}
"""Which argument behind the tensor says the dimension, and what it is where none does; None: all of them."""


@rule(*_DIMS)
def along(call: Call, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    place, default = _DIMS[call.name]
    given = args[place : place + 1]
    return _along(call, input, kwargs.get("dim", given[0] if given else default), *args, **kwargs)


@rule("max", "min")
def extreme_with_places(call: Call, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of all elements, of two tensors, or along a dimension, with the places."""
    dim = kwargs.get("dim", args[0] if args else None)
    if isinstance(dim, int):
        return _along(call, input, dim, *args, **kwargs)
    return all_of(call, input, *args, **kwargs)


def _along(call: Call, input: torch.Tensor, dim: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not (dim is None or isinstance(dim, int)):
        raise call.refused(f"is not known with {dim!r} for a dimension")
    rank = len(shape_of(input))
    dims = dims_of(dim, rank)
    cut = _whole_along(call.cut(input), dims)
    local = call.enter(input, cut, ())
    found = call.function(local, *args, **kwargs)
    left = cut if next(tensors_in(found)).dim() == rank else cut_after(call, input, dims, keepdim=False)
    if isinstance(found, torch.Tensor):
        return call.leave(found, left)
    return type(found)([call.leave(one, left) for one in found])


@rule("flip")
def flip(call: Call, input: torch.Tensor, *dims: Any, **kwargs: Any) -> torch.Tensor:
    given = dims or (kwargs["dims"],)
    along_these = given[0] if isinstance(given[0], list | tuple) else given
    if not along_these:
        return call.leave(call.open(input), call.cut(input))
    cut = _whole_along(call.cut(input), dims_of(along_these, len(shape_of(input))))
    return call.leave(call.enter(input, cut, ()).flip(along_these), cut)


def _whole_along(cut: Cut, dims: tuple[int, ...]) -> Cut:
    return tuple(None if dim in dims else dim for dim in cut)
