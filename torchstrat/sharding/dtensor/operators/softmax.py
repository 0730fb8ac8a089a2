"""Softmax and its logarithm, also over a dimension that is cut: then maxima and sums are put together."""

from __future__ import annotations

from typing import Any

import torch

from torchstrat.core.half_precision import widen
from torchstrat.sharding.dtensor.operators.reductions import axes_within, cut_after
from torchstrat.sharding.dtensor.operators.rules import Call, dims_of, one_dim, rule, shape_of


@rule("softmax", "log_softmax")
def softmax(
    call: Call, input: torch.Tensor, dim: int | None = None, *args: Any, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    if dim is None:
        raise call.refused("needs its dim")
    dtype = next((one for one in args if isinstance(one, torch.dtype)), dtype)
    place = one_dim(dim, len(shape_of(input)))
    local = call.open(input)
    if dtype is not None:
        local = local.to(dtype)
    is_log = call.name == "log_softmax"
    axes = call.axes_of(input, place)
    if not axes:
        plain = torch.log_softmax(local, place) if is_log else torch.softmax(local, place)
        return call.leave(plain, call.cut(input))
    kind, local = torch.softmax(local.new_zeros(1), 0).dtype, widen(local)  # as autocast has it
    shifted = local - call.largest(local.detach().amax(place, keepdim=True), axes)
    powers = shifted.exp()
    sums = call.total(powers.sum(place, keepdim=True), axes)
    return call.leave((shifted - sums.log() if is_log else powers / sums).to(kind), call.cut(input))


@rule("logsumexp")
def logsumexp(call: Call, input: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    dims = dims_of(dim, len(shape_of(input)))
    axes, cut, local = axes_within(call, input, dims), cut_after(call, input, dims, keepdim), call.open(input)
    if not axes:
        return call.leave(torch.logsumexp(local, dims, keepdim), cut)
    kind, local = local.dtype, widen(local)
    highest = call.largest(local.detach().amax(dims, keepdim=True), axes)
    highest = torch.where(highest.isinf(), 0, highest)
    sums = call.added_up((local - highest).exp().sum(dims, keepdim=True), axes)
    found = (sums.log() + highest).to(kind)
    return call.leave(found if keepdim else found.squeeze(dims), cut)
