"""Norms, as clipping takes them of the gradients of all parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchstrat.core.half_precision import widen
from torchstrat.sharding.dtensor.cut_tensor import CutTensor
from torchstrat.sharding.dtensor.operators.reductions import axes_within, cut_after, root
from torchstrat.sharding.dtensor.operators.rules import Call, dims_of, rule, shape_of


@rule(torch.linalg.vector_norm)
def vector_norm(
    call: Call, x: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
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


@rule(torch._foreach_norm)
def norms(call: Call, tensors: Sequence[torch.Tensor], ord: float = 2, dtype: Any = None) -> list[torch.Tensor]:
    found = []
    for tensor in tensors:
        if not isinstance(tensor, CutTensor):
            found.append(torch.linalg.vector_norm(tensor, ord, dtype=dtype))
        else:
            found.append(vector_norm(call, tensor, ord, dtype=dtype))
    return found
