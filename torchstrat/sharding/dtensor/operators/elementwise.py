"""Functions of elements, with broadcasting, and dropout; in place, too, where a variable or its gradient is written to.
And other shapes of the same elements.

The largest tensor that is cut decides how the others are. Dropout draws for the whole tensor on every logical device,
and uses its part: so the replica's stream of random numbers goes on everywhere as it would with one logical device, and
so do the masks.

Written to are variables that are cut, as averages of weights do it, and their gradients. Nothing else may be: a piece
may be a view of a tensor that the program has whole, and of that each process would change another part.

Other shapes: what stays where it is. Whatever would need other pieces raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from torchstrat.core.tensor_classes import tensors_in
from torchstrat.sharding.dtensor.cut_tensors import CutTensor, local_of, requires_grad, shape_of
from torchstrat.sharding.dtensor.devices import Cut, cut_axes
from torchstrat.sharding.dtensor.operators.data_attribute import require_own_memory
from torchstrat.sharding.dtensor.operators.rules import Call, Dims, functions_called, one_dim, rule

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
    opened = call.open(tensor)
    moved = _moved(opened, args, {}) if call.name == "type_as" else call.function(opened, *args, **kwargs)
    return tensor if moved is opened else call.leave(moved, call.cut(tensor))


@rule("to")
def to(call: Call, tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    if call.cut(tensor) == call.devices.axes.whole:
        return _moved(tensor, args, kwargs)
    opened = call.open(tensor)
    moved = _moved(opened, args, kwargs)
    if moved.device != call.devices.device:
        raise call.refused(f"would move it to {moved.device}; pieces stay on their logical devices")
    return tensor if moved is opened else call.leave(moved, call.cut(tensor))


@rule("cpu")
def cpu(call: Call, tensor: torch.Tensor, **kwargs: object) -> torch.Tensor:
    return to(call, tensor, "cpu", **kwargs)


def _moved(tensor: torch.Tensor, args: Sequence[object], kwargs: dict[str, object]) -> torch.Tensor:
    """``tensor.to(*args, **kwargs)``, and of other tensors their dtype."""
    move: Callable[..., torch.Tensor] = tensor.to
    return move(*(one.dtype if isinstance(one, torch.Tensor) else one for one in args), **kwargs)


@rule("full_like", "ones_like", "rand_like", "randn_like", "zeros_like")
def made_like(call: Call, input: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
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
        raise call.refused(
            "would write it to one that is not; use what replicate_to_logical_devices returns. If that is a parameter, "
            "name it in sharding_rules, too: those of an AveragedModel that is made in one scope with its model are "
            "called 'module.…'; made in another scope, behind it, it is cut as its model is"
        )
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


def _sizes(given: Sequence[Any]) -> list[int]:
    """Sizes or dimensions, given one by one or as one sequence."""
    return list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else list(given)


# -- order of dimensions -------------------------------------------------------------------------------------------


@rule("permute")
def permute(call: Call, input: torch.Tensor, *dims: object, **kwargs: object) -> torch.Tensor:
    order = [one_dim(dim, len(shape_of(input))) for dim in _sizes(dims or (kwargs["dims"],))]
    cut = tuple(None if dim is None else order.index(dim) for dim in call.cut(input))
    return call.leave(call.open(input).permute(order), cut)


@rule("transpose", "swapaxes", "swapdims")
def transpose(call: Call, input: torch.Tensor, dim0: int, dim1: int) -> torch.Tensor:
    order = list(range(len(shape_of(input))))
    one, other = one_dim(dim0, len(order)), one_dim(dim1, len(order))
    order[one], order[other] = other, one
    return permute(call, input, order)


@rule("t", torch.Tensor.T.__get__, torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
def transposed(call: Call, input: torch.Tensor) -> torch.Tensor:
    rank = len(shape_of(input))
    if rank != 2 and call.function != torch.Tensor.mT.__get__:  # type: ignore[attr-defined]
        raise call.refused("takes matrices")
    return transpose(call, input, -2, -1)


# -- dimensions joined and parted ----------------------------------------------------------------------------------


@rule("reshape", "view")
def reshape(call: Call, input: torch.Tensor, *shape: object, **kwargs: object) -> torch.Tensor:
    sizes = _sizes(shape or (kwargs["shape"],))
    if not all(isinstance(size, int) for size in sizes):
        raise call.refused("to another dtype")
    old = shape_of(input)
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = old.numel() // rest if rest else 0
    if math.prod(sizes) != old.numel():
        raise RuntimeError(f"shape {sizes} is invalid for input of size {old.numel()}")
    if not old.numel():
        return call.enter(input, call.devices.axes.whole, ()).reshape(sizes)
    cut = _cut_of_reshaped(call, input, old, sizes)
    return call.leave(call.open(input).reshape(call.devices.axes.piece_shape(sizes, cut)), cut)


@rule("view_as")
def view_as(call: Call, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return reshape(call, input, shape_of(other))


def _cut_of_reshaped(call: Call, input: torch.Tensor, old: Sequence[int], new: Sequence[int]) -> Cut:
    where: dict[int, int] = {}
    axes, cut = call.devices.axes, call.cut(input)
    for before, after in _groups(old, new):
        for dim in before:
            parts = axes.parts(cut, dim)
            if parts == 1:
                continue
            # The parts of a group's slowest dimension lie one after the other whatever is made of the group.
            if dim != before[0] or not after or new[after[0]] % parts:
                raise call.refused(
                    f"of shape {tuple(old)} to {tuple(new)} would need other pieces: dimension {dim} is cut into "
                    f"{parts} parts"
                )
            where[dim] = after[0]
    return tuple(None if dim is None else where[dim] for dim in cut)


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Dimensions of the old and the new shape that hold the same elements; none of size 1."""
    before = [dim for dim, size in enumerate(old) if size != 1]
    after = [dim for dim, size in enumerate(new) if size != 1]
    while before:
        left, right = [before.pop(0)], [after.pop(0)] if after else []
        while (sizes := (math.prod(old[dim] for dim in left), math.prod(new[dim] for dim in right)))[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                left.append(before.pop(0))
            else:
                right.append(after.pop(0))
        yield left, right


@rule("flatten")
def flatten(call: Call, input: torch.Tensor, start_dim: int = 0, end_dim: int = -1) -> torch.Tensor:
    shape = list(shape_of(input))
    start, end = one_dim(start_dim, len(shape)), one_dim(end_dim, len(shape))
    return reshape(call, input, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


@rule("unflatten")
def unflatten(call: Call, input: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    shape, place, parts = list(shape_of(input)), one_dim(dim, len(shape_of(input))), list(sizes)
    if -1 in parts:
        parts[parts.index(-1)] = shape[place] // math.prod(size for size in parts if size != -1)
    return reshape(call, input, [*shape[:place], *parts, *shape[place + 1 :]])


@rule("unsqueeze")
def unsqueeze(call: Call, input: torch.Tensor, dim: int) -> torch.Tensor:
    shape = list(shape_of(input))
    place = one_dim(dim, len(shape) + 1)
    cut = tuple(one + 1 if one is not None and one >= place else one for one in call.cut(input))
    return call.leave(call.open(input).unsqueeze(place), cut)


@rule("squeeze")
def squeeze(call: Call, input: torch.Tensor, dim: Dims = None) -> torch.Tensor:
    shape = shape_of(input)
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = [one for one in sorted({one_dim(one, len(shape)) for one in dims}) if shape[one] == 1]
    cut = tuple(one if one is None else one - sum(place < one for place in gone) for one in call.cut(input))
    return call.leave(call.open(input).squeeze(gone), cut)


@rule("expand")
def expand(call: Call, input: torch.Tensor, *sizes: object) -> torch.Tensor:
    old, new = shape_of(input), _sizes(sizes)
    offset = len(new) - len(old)
    whole = [size if size != -1 else old[dim - offset] for dim, size in enumerate(new)]
    cut = tuple(None if dim is None else dim + offset for dim in call.cut(input))
    local = call.enter(input, call.cut(input), ()).expand(call.devices.axes.piece_shape(whole, cut))
    return call.leave(local, cut)


# -- parts and joins -----------------------------------------------------------------------------------------------


@rule("chunk", "split")
def parts_of(call: Call, input: torch.Tensor, *args: Any, dim: int = 0, **kwargs: object) -> tuple[torch.Tensor, ...]:
    if len(args) > 1:
        args, dim = args[:1], args[1]
    _require_whole(call, input, dim)
    cut = call.cut(input)
    return tuple(call.leave(one, cut) for one in call.function(call.open(input), *args, dim=dim, **kwargs))


@rule("narrow")
def narrow(call: Call, input: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    _require_whole(call, input, dim)
    return call.leave(call.open(input).narrow(dim, start, length), call.cut(input))


@rule("select")
def select(call: Call, input: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    _require_whole(call, input, dim)
    place = one_dim(dim, len(shape_of(input)))
    cut = tuple(one - 1 if one is not None and one > place else one for one in call.cut(input))
    return call.leave(call.open(input).select(place, index), cut)


def _require_whole(call: Call, input: torch.Tensor, dim: int) -> None:
    place = one_dim(dim, len(shape_of(input)))
    if call.axes_of(input, place):
        raise call.refused(f"along dimension {place}, which is cut")


@rule("__getitem__")
def item(call: Call, input: torch.Tensor, index: Any) -> torch.Tensor:
    """By integers, slices, None and ``...``; what is cut only as a whole."""
    if call.cut(input) == call.devices.axes.whole:
        raise call.refused("as an index")
    entries = list(index) if isinstance(index, tuple) else [index]
    rank = len(shape_of(input))
    if not all(one is None or one is Ellipsis or type(one) in (int, slice) for one in entries):
        raise call.refused("by tensors, lists or truth values")
    named = sum(one is not None and one is not Ellipsis for one in entries)
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        entries[place : place + 1] = [slice(None)] * (rank - named)
    else:
        entries += [slice(None)] * (rank - named)
    where: dict[int, int] = {}
    source = result = 0
    for entry in entries:
        if isinstance(entry, slice):
            where[source] = result
        if entry is not None:
            if entry != slice(None):
                _require_whole(call, input, source)
            source += 1
        result += not isinstance(entry, int)
    cut = tuple(None if dim is None else where[dim] for dim in call.cut(input))
    return call.leave(call.open(input)[tuple(entries)], cut)


@rule("cat", "concat", "concatenate")
def cat(call: Call, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    full = [one for one in tensors if tuple(shape_of(one)) != (0,)] or list(tensors)  # beside others, (0,) is nothing
    rank = len(shape_of(full[0]))
    place = one_dim(dim, rank)
    if any(call.axes_of(one, place) for one in full):
        raise call.refused(f"along dimension {place}, which is cut")
    cut = cut_of_result(call, full, shape_of(full[0]))
    entered = [call.enter(one, cut, cut_axes(cut)) if len(shape_of(one)) == rank else call.open(one) for one in tensors]
    return call.leave(torch.cat(entered, place), cut)


@rule("stack")
def stack(call: Call, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    rank = len(shape_of(tensors[0]))
    place, cut = one_dim(dim, rank + 1), cut_of_result(call, tensors, shape_of(tensors[0]))
    local = torch.stack([call.enter(one, cut, cut_axes(cut)) for one in tensors], place)
    return call.leave(local, tuple(one + 1 if one is not None and one >= place else one for one in cut))
