"""Other shapes of the same elements: what stays where it is. Whatever would need other pieces raises."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchstrat.sharding.dtensor.cut_tensors import shape_of
from torchstrat.sharding.dtensor.devices import Cut, cut_axes
from torchstrat.sharding.dtensor.operators.elementwise import cut_of_result
from torchstrat.sharding.dtensor.operators.rules import Call, Dims, one_dim, rule


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
