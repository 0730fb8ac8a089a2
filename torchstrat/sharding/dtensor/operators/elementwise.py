"""Functions of elements, with broadcasting, and dropout; in place, too, where a variable or its gradient is written to.

The largest tensor that is cut decides how the others are. Dropout draws for the whole tensor on every logical device,
and uses its part: so the replica's stream of random numbers goes on everywhere as it would with one logical device, and
so do the masks.

Written to are variables that are cut, as averages of weights do it, and their gradients. Nothing else may be: a piece
may be a view of a tensor that the program has whole, and of that each process would change another part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from torchstrat.core.tensor_functions import tensors_in
from torchstrat.sharding.dtensor.cut_tensors import CutTensor, local_of, requires_grad, shape_of
from torchstrat.sharding.dtensor.devices import Cut, cut_axes
from torchstrat.sharding.dtensor.operators.data_attribute import require_own_memory
from torchstrat.sharding.dtensor.operators.rules import Call, functions_called, rule

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
NEW_ONLY = ("celu", "hardshrink", "softshrink", "tanhshrink", "threshold")
"""Not in place."""
_CASTS = ("bfloat16", "bool", "clone", "contiguous", "double", "float", "half", "int", "long", "type_as")


@rule(*UNARY, *NEW_ONLY, *BINARY)
def elementwise(call: Call, *args: object, **kwargs: object) -> torch.Tensor:
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
    **dict.fromkeys(functions_called("celu"), 2),
    **{one: 3 for name in ("hardtanh", "threshold") for one in functions_called(name)},
}
"""Functions of ``torch.nn.functional`` → the place of ``inplace`` among their arguments."""


def _has_positional_inplace(call: Call, args: Sequence[object]) -> bool:
    place = _WITH_INPLACE.get(call.function)
    return place is not None and len(args) > place and args[place] is True


@rule(*_CASTS)
def cast(call: Call, tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Of one tensor; of others, only dtype and device matter."""
    if call.cut(tensor) == call.devices.axes.whole:  # plain.type_as(cut)
        return _moved(tensor, args, {})
    if call.name == "type_as":
        return call.leave(_moved(call.open(tensor), args, {}), call.cut(tensor))
    return call.leave(call.function(call.open(tensor), *args, **kwargs), call.cut(tensor))


@rule("to")
def to(call: Call, tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    if call.cut(tensor) == call.devices.axes.whole:
        return _moved(tensor, args, kwargs)
    moved = _moved(call.open(tensor), args, kwargs)
    if moved.device != call.devices.device:
        raise call.refused(f"would move it to {moved.device}; pieces stay on their logical devices")
    return call.leave(moved, call.cut(tensor))


def _moved(tensor: torch.Tensor, args: Sequence[object], kwargs: dict[str, object]) -> torch.Tensor:
    """``tensor.to(*args, **kwargs)``, and of other tensors their dtype."""
    move: Callable[..., torch.Tensor] = tensor.to
    return move(*(one.dtype if isinstance(one, torch.Tensor) else one for one in args), **kwargs)


@rule("full_like", "ones_like", "rand_like", "randn_like", "zeros_like")
def made_like(call: Call, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Random numbers are drawn for the whole tensor, as dropout draws."""
    if kwargs.get("requires_grad"):
        raise call.refused("would be a leaf that requires gradients; leave requires_grad out")
    cut, local = call.cut(input), call.open(input).detach()
    if call.name.startswith("rand"):
        made = call.devices.own_piece(call.function(local.new_empty(shape_of(input)), *args, **kwargs), cut).clone()
    else:
        made = call.function(local, *args, **kwargs)
    if made.device != call.devices.device:
        raise call.refused(f"would be made on {made.device}; pieces stay on their logical devices")
    return call.leave(made, cut)


@rule("prelu")
def prelu(call: Call, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    cut, is_by_channel = call.cut(input), shape_of(weight).numel() != 1
    of_weight = tuple(0 if is_by_channel and dim == 1 else None for dim in cut)
    slopes = call.enter(weight, of_weight, cut_axes(cut))
    return call.leave(functional.prelu(call.open(input), slopes), cut)


def over_elements(call: Call, args: Sequence[object], kwargs: dict[str, object]) -> torch.Tensor:
    tensors = list(tensors_in((args, kwargs)))
    shape = torch.broadcast_shapes(*[shape_of(tensor) for tensor in tensors])
    cut = cut_of_result(call, tensors, shape)

    def piece(value: object) -> object:
        return aligned(call, value, shape, cut) if isinstance(value, torch.Tensor) else value

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


_ELEMENTWISE = [one for name in (*UNARY, *BINARY, "copy", "zero", "fill") for one in functions_called(f"{name}_")]
_OPERATORS = [getattr(torch.Tensor, f"__i{name}__") for name in ("add", "sub", "mul", "truediv", "pow")]
_OF_LISTS = {
    getattr(torch, f"_foreach_{name}_"): getattr(torch.Tensor, f"{name}_")
    for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "neg", "abs", "sqrt", "pow", "copy", "zero")
    if hasattr(torch, f"_foreach_{name}_")
}


@rule(*_ELEMENTWISE, *_OPERATORS)
def in_place(call: Call, target: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """The same function on the piece, and on pieces of the other arguments that go with it."""
    _require_writable(call, target, [*tensors_in((args, kwargs))])
    assert isinstance(target, CutTensor)
    shape, cut = shape_of(target), target.cut

    def piece(value: object) -> object:
        return aligned(call, value, shape, cut) if isinstance(value, torch.Tensor) else value

    with torch.no_grad():
        call.function(local_of(target), *map(piece, args), **{name: piece(one) for name, one in kwargs.items()})
    return target


def _require_writable(call: Call, target: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    if not isinstance(target, CutTensor):
        raise call.refused("would write it to one that is not; use what replicate_to_logical_devices returns")
    if not target.can_be_written:
        raise call.refused("would change it in place; write the result to a new tensor")
    if torch.is_grad_enabled() and any(requires_grad(one) for one in (target, *others)):
        raise call.refused("would change a variable as a part of what is differentiated; do it under torch.no_grad()")
    require_own_memory([target], f"{call.name} would write to")


@rule(*_OF_LISTS)
def in_place_of_lists(call: Call, targets: Sequence[torch.Tensor], *args: object, **kwargs: object) -> object:
    """``args``: lists as long as ``targets``, or one number or tensor for all of them."""
    function = _OF_LISTS[call.function]
    of_one = Call(function, call.devices)
    for index, target in enumerate(targets):
        own = [one[index] if isinstance(one, list | tuple) else one for one in args]
        if any(isinstance(one, CutTensor) for one in (target, *own)):
            in_place(of_one, target, *own, **kwargs)
        else:
            function(target, *own, **kwargs)
    return list(targets)


def own_noise(call: Call, shape: torch.Size, cut: Cut, like: torch.Tensor, p: float) -> torch.Tensor:
    """This process's part of what dropout multiplies a tensor of ``shape`` with: 0 or 1 / (1 - p)."""
    noise = functional.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p, True)
    return call.devices.own_piece(noise, cut)


@rule("dropout")
def dropout(
    call: Call, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if inplace:
        raise call.refused("would change it in place with inplace=True; leave that out")
    if not training or p == 0:
        return input
    local, cut = call.open(input), call.cut(input)
    return call.leave(local * own_noise(call, shape_of(input), cut, local.detach(), p), cut)
