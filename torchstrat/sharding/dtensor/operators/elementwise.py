"""Functions of elements, with broadcasting. The largest tensor that is cut decides how the others are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchstrat.core.operands import tensors_in
from torchstrat.sharding.dtensor._torch_dtensor import local_of
from torchstrat.sharding.dtensor.axes import Cut
from torchstrat.sharding.dtensor.cut_tensor import CutTensor, cut_tensor
from torchstrat.sharding.dtensor.operators.rules import Call, cut_axes, functions_called, rule, shape_of

UNARY = (
    *("abs", "ceil", "clamp", "clip", "cos", "erf", "exp", "expm1", "floor", "isfinite", "isinf", "isnan", "log"),
    *("log10", "log1p", "log2", "logical_not", "neg", "negative", "nan_to_num", "reciprocal", "round", "rsqrt"),
    *("sigmoid", "sign", "sin", "sqrt", "square", "tanh"),
    *("elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "relu", "relu6"),
    *("selu", "silu", "softplus", "softsign"),
)
BINARY = (
    *("add", "atan2", "div", "divide", "eq", "fmod", "ge", "greater", "greater_equal", "gt", "le", "lerp", "less"),
    *("less_equal", "logical_and", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mul"),
    *("multiply", "ne", "not_equal", "pow", "remainder", "rsub", "sub", "subtract", "true_divide", "where"),
    *("addcmul", "addcdiv", "__rsub__", "__rdiv__", "__rtruediv__", "__pow__", "__rpow__", "__eq__", "__ne__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__truediv__"),
)
_CASTS = ("bfloat16", "bool", "clone", "contiguous", "double", "float", "half", "int", "long", "type_as")


@rule(*UNARY, *BINARY)
def elementwise(call: Call, *args: Any, **kwargs: Any) -> torch.Tensor:
    if kwargs.get("inplace"):
        raise call.refused("would change it in place with inplace=True; leave that out")
    if call.name == "where" and len(args) + len(kwargs) == 1:
        raise call.refused("finds indices; use it with two values to choose from")
    if _has_positional_inplace(call, args):
        raise call.refused("would change it in place; leave inplace out")
    return over_elements(call, args, kwargs)


_WITH_INPLACE = {
    **{one: 2 for name in ("elu", "leaky_relu") for one in functions_called(name)},
    **{
        one: 1
        for name in ("relu", "relu6", "silu", "mish", "hardswish", "selu", "hardsigmoid")
        for one in functions_called(name)
    },
    **dict.fromkeys(functions_called("hardtanh"), 3),
}
"""Functions of ``torch.nn.functional`` → the place of ``inplace`` among their arguments."""


def _has_positional_inplace(call: Call, args: Sequence[Any]) -> bool:
    place = _WITH_INPLACE.get(call.function)
    return place is not None and len(args) > place and args[place] is True


@rule(*_CASTS)
def cast(call: Call, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Of one tensor; of others, only dtype and device matter."""
    if not isinstance(tensor, torch.Tensor) or call.cut(tensor) == call.devices.axes.whole:
        others: list[Any] = [one.dtype if isinstance(one, torch.Tensor) else one for one in args]  # plain.type_as(cut)
        return tensor.to(*others)
    if call.name == "type_as":
        return call.leave(call.open(tensor).to(args[0].dtype), call.cut(tensor))
    return call.leave(call.function(call.open(tensor), *args, **kwargs), call.cut(tensor))


_DATA: Any = torch.Tensor.data


@rule("detach", _DATA.__get__)
def detach(call: Call, tensor: CutTensor) -> torch.Tensor:
    """The same memory: of a variable, or of its gradient, it may be written to."""
    found = cut_tensor(local_of(tensor).detach(), tensor._cut, call.devices)
    found._is_value, found._is_gradient = tensor._is_value, tensor._is_gradient
    return found


@rule("to")
def to(call: Call, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    plain: list[Any] = [one.dtype if isinstance(one, torch.Tensor) else one for one in args]
    if call.cut(tensor) == call.devices.axes.whole:
        return tensor.to(*plain, **kwargs)
    moved = call.open(tensor).to(*plain, **kwargs)
    if moved.device != call.devices.device:
        raise call.refused(f"would move it to {moved.device}; pieces stay on their logical devices")
    return call.leave(moved, call.cut(tensor))


def over_elements(call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    tensors = list(tensors_in((args, kwargs)))
    shape = torch.broadcast_shapes(*[shape_of(tensor) for tensor in tensors])
    cut = cut_of_result(call, tensors, shape)

    def piece(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return aligned(call, value, shape, cut)
        return value

    local = call.function(*[piece(one) for one in args], **{name: piece(one) for name, one in kwargs.items()})
    return call.leave(local, cut)


def cut_of_result(call: Call, tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> Cut:
    """Of a result of ``shape``: along each axis as the largest tensor that the axis cuts."""
    rank = len(shape)
    by_size = sorted(tensors, key=lambda tensor: -math.prod(shape_of(tensor)))  # stable: the first of equal ones
    found: list[int | None] = []
    for axis in range(call.devices.axes.count):
        dims = ((call.cut(one)[axis], len(shape_of(one))) for one in by_size)
        found.append(next((dim + rank - own for dim, own in dims if dim is not None), None))
    return tuple(call.fitting(found, dict(enumerate(shape))))


def aligned(call: Call, tensor: torch.Tensor, shape: Sequence[int], cut: Cut) -> torch.Tensor:
    """The piece of ``tensor`` that goes with that of a result of ``shape`` cut like ``cut``; broadcast dimensions, and
    those that it lacks, it has whole."""
    own = shape_of(tensor)
    offset = len(shape) - len(own)

    def dim_of(dim: int | None) -> int | None:
        if dim is None or dim < offset or own[dim - offset] != shape[dim]:
            return None
        return dim - offset

    return call.enter(tensor, tuple(dim_of(dim) for dim in cut), cut_axes(cut))
