"""Functions along one dimension: places of extremes, sorting, running sums. They have it whole."""

from __future__ import annotations

from typing import Any

import torch

from torchstrat.core.tensor_functions import tensors_in
from torchstrat.sharding.dtensor.cut_tensors import shape_of
from torchstrat.sharding.dtensor.devices import Cut
from torchstrat.sharding.dtensor.operators.reductions import all_of, cut_after
from torchstrat.sharding.dtensor.operators.rules import Call, dims_of, rule

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
