"""Layer, RMS, group and batch normalisation. Statistics over a dimension that is cut are put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from torchstrat.core.half_precision import widen
from torchstrat.sharding.dtensor.devices import Cut
from torchstrat.sharding.dtensor.operators.rules import Call, cut_axes, rule, shape_of


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
    if not training:
        return call.leave(
            functional.batch_norm(local, running_mean, running_var, weights[0], weights[1], False, momentum, eps), cut
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
