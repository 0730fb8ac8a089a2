"""Sums of products: linear layers, matrix products, attention, rows of tables (products with one-hot rows), images.

Each dimension of the operands and the result has a label, and each axis cuts one label, in every tensor that has it;
one that the result lacks (the *inner* dimension) leaves parts to be added up. Where operands disagree about an axis,
the smaller one is made whole along it.

Images may be cut into bands. A band gets the neighbours' outermost rows before it is convolved or pooled. That works
where each band makes its own band of the result: the result's height times the stride has to be the height.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from torchstrat.sharding.dtensor import cut_tensors
from torchstrat.sharding.dtensor.cut_tensors import shape_of
from torchstrat.sharding.dtensor.devices import Cut
from torchstrat.sharding.dtensor.operators.elementwise import own_noise
from torchstrat.sharding.dtensor.operators.reductions import mean
from torchstrat.sharding.dtensor.operators.rules import Call, rule

INNER = "inner"


def agree_on_labels(
    call: Call, operands: Sequence[torch.Tensor], labels: Sequence[Sequence[str | None]]
) -> list[str | None]:
    """For each axis the label that it cuts. ``labels``: of the operands' dimensions; None for one that is broadcast."""
    by_size = sorted(range(len(operands)), key=lambda index: -math.prod(shape_of(operands[index])))
    chosen: list[str | None] = []
    for axis in range(call.devices.axes.count):
        cuts = ((labels[index], call.cut(operands[index])[axis]) for index in by_size)
        chosen.append(next((own[dim] for own, dim in cuts if dim is not None), None))
    sizes = {
        label: size
        for own, operand in zip(labels, operands, strict=True)
        for label, size in zip(own, shape_of(operand), strict=True)
        if label is not None
    }
    return call.fitting(chosen, sizes)


def cut_by_labels(chosen: Sequence[str | None], labels: Sequence[str | None]) -> Cut:
    return tuple(labels.index(label) if label is not None and label in labels else None for label in chosen)


def contract(
    call: Call,
    left: torch.Tensor,
    right: torch.Tensor,
    labels: tuple[Sequence[str | None], Sequence[str | None]],
    result: Sequence[str | None],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    chosen = agree_on_labels(call, (left, right), labels)
    varying = [axis for axis, label in enumerate(chosen) if label is not None]
    parts = [axis for axis in varying if chosen[axis] == INNER]
    one = call.enter(left, cut_by_labels(chosen, labels[0]), varying)
    other = call.enter(right, cut_by_labels(chosen, labels[1]), varying)
    cut = cut_by_labels(chosen, result)
    own_bias = None
    if bias is not None:
        of_bias = tuple(0 if label == result[-1] else None for label in chosen)
        own_bias = call.enter(bias, of_bias, [axis for axis in varying if axis not in parts])
    if call.function is functional.linear:
        local = functional.linear(one, other, None if parts else own_bias)
    else:
        local = torch.matmul(one, other)
    if parts:
        local = call.added_up(local, parts)
        if own_bias is not None:
            local = local + own_bias.to(local.dtype)  # in autocast the product has another
    return call.leave(local, cut)


@rule("linear")
def linear(call: Call, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rank = len(shape_of(input))
    if len(shape_of(weight)) != 2:
        raise call.refused("takes weights (outputs, inputs)")
    if bias is not None and shape_of(bias) != shape_of(weight)[:1]:
        raise call.refused("takes a bias (outputs)")
    rows = [f"row {dim}" for dim in range(rank - 1)]
    return contract(call, input, weight, ([*rows, INNER], ["out", INNER]), [*rows, "out"], bias)


@rule("matmul", "mm", "bmm", "__matmul__")
def matmul(call: Call, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    left, right = shape_of(input), shape_of(other)
    batch = torch.broadcast_shapes(left[:-2], right[:-2])
    names = [f"batch {dim}" for dim in range(len(batch))]

    def of_batch(shape: torch.Size) -> list[str | None]:
        own = shape[:-2]
        offset = len(batch) - len(own)
        return [names[offset + dim] if size == batch[offset + dim] else None for dim, size in enumerate(own)]

    of_left = [*of_batch(left), *(["rows"] if len(left) > 1 else []), INNER]
    of_right = [*of_batch(right), INNER, *(["columns"] if len(right) > 1 else [])]
    result = [*names, *(["rows"] if len(left) > 1 else []), *(["columns"] if len(right) > 1 else [])]
    return contract(call, input, other, (of_left, of_right), result)


@rule("__rmatmul__")
def reversed_matmul(call: Call, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return matmul(call, other, input)


@rule(functional.embedding)
def embedding(
    call: Call,
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """``weight``: ``(rows, columns)``, cut by either; indices may be cut as well. A table that is cut by rows
    answers for its own; the answers are added up."""
    for name, given in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if given:
            raise call.refused(f"with {name}={given} is not known there")
    rows = shape_of(weight)[0]
    labels = [f"index {dim}" for dim in range(len(shape_of(input)))]
    chosen: list[str | None] = []
    for of_input, of_weight in zip(call.cut(input), call.cut(weight), strict=True):
        of_table = None if of_weight is None else ("rows", "columns")[of_weight]
        # Indices are small: where both are cut along an axis, they are made whole.
        chosen.append(of_table if of_table is not None or of_input is None else labels[of_input])
    varying = [axis for axis, label in enumerate(chosen) if label is not None]
    by_rows = [axis for axis in varying if chosen[axis] == "rows"]
    indices = call.enter(input, cut_by_labels(chosen, labels), varying)
    table = call.enter(weight, cut_by_labels(chosen, ["rows", "columns"]), varying)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += rows
    cut = cut_by_labels(chosen, [*labels, "columns"])
    if not by_rows:
        return call.leave(functional.embedding(indices, table, padding_idx), cut)
    first = call.devices.axes.index_along(call.devices.own, by_rows) * table.shape[0]
    if indices.numel() and not bool(((indices >= 0) & (indices < rows)).all()):
        raise IndexError(f"embedding: an index is outside of the table's {rows} rows")
    own = (indices >= first) & (indices < first + table.shape[0])
    found = functional.embedding(torch.where(own, indices - first, 0), table)
    counts = own if padding_idx is None else own & (indices != padding_idx)
    # Rows of padding have values and no gradient.
    kept = torch.where(counts.unsqueeze(-1), found, torch.where(own.unsqueeze(-1), found.detach(), 0))
    return call.leave(call.added_up(kept, by_rows), cut)


@rule(torch.embedding)
def embedding_of_weight(
    call: Call,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """The same with its arguments in another order, where -1 is no padding."""
    padding = None if padding_idx == -1 else padding_idx
    return embedding(call, indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


@rule("scaled_dot_product_attention")
def attention(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``query``: ``(…, queries, width)``, ``key``: ``(…, keys, width)``, ``value``: ``(…, keys, columns)``.

    Cut along batches and heads, along the queries, or along the columns. Keys that are cut are made whole: every query
    looks at all of them.
    """
    if attn_mask is not None and is_causal:
        raise call.refused("with attn_mask and is_causal at once; let the mask hide what comes later, too")
    shapes = [shape_of(one) for one in (query, key, value)]
    batch = torch.broadcast_shapes(shapes[0][:-2], *([] if enable_gqa else [shapes[1][:-2], shapes[2][:-2]]))
    names = [f"batch {dim}" for dim in range(len(batch))]
    last = (("queries", None), (None, None), (None, "columns"))
    labels = [
        [*_of_batch(shape, batch, names, shares_heads=enable_gqa), *own]
        for shape, own in zip(shapes, last, strict=True)
    ]
    chosen = _agreed(call, (query, key, value), labels)
    last_sizes = {"queries": shapes[0][-2], "columns": shapes[2][-1]}
    chosen = call.fitting(chosen, {**dict(zip(names, batch, strict=True)), **last_sizes})
    if enable_gqa:
        heads = names[-1]
        for axis, label in enumerate(chosen):
            if label == heads and shapes[1][-3] % call.devices.axes.size_of(_axes(chosen, heads)):
                chosen[axis] = None  # fewer heads of keys than logical devices
    varying = [axis for axis, label in enumerate(chosen) if label is not None]
    own = [
        call.enter(one, cut_by_labels(chosen, label), varying)
        for one, label in zip((query, key, value), labels, strict=True)
    ]
    sizes = (*batch, shapes[0][-2], shapes[1][-2])
    mask = None
    if attn_mask is not None:
        mask_shape = shape_of(attn_mask)
        of_mask = _of_batch(mask_shape, sizes, [*names, "queries", "keys"], shares_heads=False, trailing=0)
        mask = call.enter(attn_mask, cut_by_labels(chosen, of_mask), varying)
    queries = _axes(chosen, "queries")
    if is_causal and queries:
        whole = torch.ones(sizes[-2:], dtype=torch.bool, device=own[0].device).tril()
        mask, is_causal = call.devices.own_part(whole, queries, 0), False
    cut = cut_by_labels(chosen, [*names, "queries", "columns"])
    if not dropout_p:
        local = functional.scaled_dot_product_attention(
            own[0], own[1], own[2], mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return call.leave(local, cut)
    if enable_gqa:
        raise call.refused("with enable_gqa and dropout")
    factor = 1 / math.sqrt(shapes[0][-1]) if scale is None else scale
    scores = (own[0] * factor) @ own[1].transpose(-2, -1)
    if is_causal:
        mask = torch.ones(sizes[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    of_scores = cut_by_labels(chosen, [*names, "queries", "keys"])
    noise = own_noise(call, torch.Size(sizes), of_scores, scores.detach(), dropout_p)
    return call.leave(_weights(scores) * noise @ own[2], cut)


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """Of the keys; a query that may look at none has none, as in PyTorch, instead of NaN."""
    sees_none = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(sees_none, 0), -1).masked_fill(sees_none, 0)


def _of_batch(
    shape: torch.Size, batch: tuple[int, ...], names: list[str], *, shares_heads: bool, trailing: int = 2
) -> list[str | None]:
    """Labels of the leading dimensions; None for one that is broadcast. ``shares_heads``: several heads of queries use
    one of keys, so the last of them has another size and is cut alike."""
    own = shape[: len(shape) - trailing]
    offset = len(batch) - len(own)
    labels: list[str | None] = []
    for dim, size in enumerate(own):
        is_heads = shares_heads and dim == len(own) - 1
        labels.append(names[offset + dim] if size == batch[offset + dim] or is_heads else None)
    return labels


def _agreed(call: Call, operands: tuple[torch.Tensor, ...], labels: list[list[str | None]]) -> list[str | None]:
    """For each axis a label of the batch if it cuts one in any operand, else what it cuts of queries or columns."""
    chosen: list[str | None] = []
    for axis in range(call.devices.axes.count):
        dims = [call.cut(one)[axis] for one in operands]
        found = [own[dim] for own, dim in zip(labels, dims, strict=True) if dim is not None and own[dim] is not None]
        found.sort(key=lambda label: not str(label).startswith("batch"))
        chosen.append(found[0] if found else None)
    return chosen


def _axes(chosen: list[str | None], label: str) -> tuple[int, ...]:
    return tuple(axis for axis, one in enumerate(chosen) if one == label)


Sides = tuple[int, int]


def _each(value: Any, count: int) -> list[int]:
    """One number for all spatial dimensions, or one for each."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * count if len(sizes) == 1 else sizes


def with_neighbours(
    call: Call,
    local: torch.Tensor,
    whole: Sequence[int],
    axes_of_dim: Callable[[int], Sequence[int]],
    windows: Sequence[tuple[int, int, Sides]],
    fill: float,
) -> tuple[torch.Tensor, list[Sides]]:
    """Bands with what they need of their neighbours.

    Args:
        whole: the shape of the whole tensor; its last dimensions are the spatial ones.
        axes_of_dim: the axes that cut a dimension.
        windows: of each spatial dimension the extent of a window, its stride, and the padding on both sides.
        fill: what is beyond the edge of the whole.

    Returns the bands, and the padding that is still to be added in each spatial dimension.
    """
    rest: list[Sides] = []
    first = len(whole) - len(windows)
    for dim, (extent, stride, (left, right)) in enumerate(windows, start=first):
        axes = axes_of_dim(dim)
        if not axes:
            rest.append((left, right))
            continue
        size, band = whole[dim], local.shape[dim]
        outputs = (size + left + right - extent) // stride + 1
        after = extent - stride - left
        if outputs * stride != size or band % stride or max(left, after) > band:
            raise call.refused(
                f"with windows of {extent}, stride {stride} and padding {(left, right)} over dimension {dim}, of size "
                f"{size} in bands of {band}, does not make the same band of its result of size {outputs} from each: "
                f"{outputs} x {stride} has to be {size}, and windows no larger than bands"
            )
        local = cut_tensors.with_edges(local, call.devices, axes, dim, left, max(0, after), fill)
        if after < 0:  # rows at the end of a band that no window needs
            local = local.narrow(dim, 0, local.shape[dim] + after)
        rest.append((0, 0))
    return local, rest


def _padding(call: Call, padding: object, windows: Sequence[tuple[int, int]]) -> list[Sides]:
    """``windows``: extent and stride of each spatial dimension."""
    if padding == "valid":
        return [(0, 0)] * len(windows)
    if padding == "same":
        return [((extent - 1) // 2, extent - 1 - (extent - 1) // 2) for extent, _ in windows]
    return [(one, one) for one in _each(padding, len(windows))]


@rule("conv1d", "conv2d", "conv3d")
def convolution(
    call: Call,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
) -> torch.Tensor:
    """``input``: ``([batch,] channels, …)``, ``weight``: ``(outputs, channels / groups, …)``."""
    spatial = len(shape_of(weight)) - 2
    batched = len(shape_of(input)) == spatial + 2
    places = [f"place {dim}" for dim in range(spatial)]
    of_input = [*(["batch"] if batched else []), INNER, *places]
    result = [*(["batch"] if batched else []), "out", *places]
    of_weight = ["out", INNER, *[None] * spatial]
    chosen = agree_on_labels(call, (input, weight), (of_input, of_weight))
    if groups > 1:
        chosen = [None if label in ("out", INNER) else label for label in chosen]
    varying = [axis for axis, label in enumerate(chosen) if label is not None]
    parts = [axis for axis in varying if chosen[axis] == INNER]
    of_pieces = cut_by_labels(chosen, of_input)
    local = call.enter(input, of_pieces, varying)
    kernel = call.enter(weight, cut_by_labels(chosen, of_weight), varying)
    own_bias = None
    if bias is not None and shape_of(bias) != shape_of(weight)[:1]:
        raise call.refused("takes a bias (outputs)")
    if bias is not None:
        of_bias = tuple(0 if label == "out" else None for label in chosen)
        own_bias = call.enter(bias, of_bias, [axis for axis in varying if axis not in parts])
    strides, dilations = _each(stride, spatial), _each(dilation, spatial)
    extents = [step * (size - 1) + 1 for step, size in zip(dilations, shape_of(weight)[2:], strict=True)]
    sides = _padding(call, padding, list(zip(extents, strides, strict=True)))
    local, rest = with_neighbours(
        call,
        local,
        shape_of(input),
        lambda dim: call.devices.axes.axes_of(of_pieces, dim),
        list(zip(extents, strides, sides, strict=True)),
        0.0,
    )
    even = [left for left, right in rest]
    if any(left != right for left, right in rest):
        local = functional.pad(local, [side for sides in reversed(rest) for side in sides])
        even = [0] * spatial
    convolved = call.function(local, kernel, None if parts else own_bias, strides, even, dilations, groups)
    if parts:
        convolved = call.added_up(convolved, parts)
        if own_bias is not None:
            convolved = convolved + own_bias.to(convolved.dtype).view(-1, *[1] * spatial)
    return call.leave(convolved, cut_by_labels(chosen, result))


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(
    call: Call,
    input: torch.Tensor,
    kernel_size: Any,
    stride: object = None,
    padding: object = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    windows = _Windows(call, kernel_size, stride, padding)
    local, rest = _pooled(call, input, windows, ceil_mode, 0.0)
    if any(side for sides in windows.sides for side in sides) and not count_include_pad:
        raise call.refused("with padding and count_include_pad=False")
    options = {} if call.name == "avg_pool1d" else {"divisor_override": divisor_override}
    pooled = call.function(local, windows.sizes, windows.steps, rest, **options)
    return call.leave(pooled, call.cut(input))


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    call: Call,
    input: torch.Tensor,
    kernel_size: object,
    stride: object = None,
    padding: object = 0,
    dilation: object = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor:
    if return_indices:
        raise call.refused("with return_indices")
    if _each(dilation, 1) != [1] * len(_each(dilation, 1)):
        raise call.refused("with dilation")
    windows = _Windows(call, kernel_size, stride, padding)
    local, rest = _pooled(call, input, windows, ceil_mode, -math.inf)
    pooled = getattr(torch, call.name)(local, windows.sizes, windows.steps, rest)
    return call.leave(pooled, call.cut(input))


class _Windows:
    """Of a pooling: size, stride and padding in each spatial dimension."""

    def __init__(self, call: Call, kernel_size: Any, stride: Any, padding: object) -> None:
        spatial = int(call.name[-2])
        self.sizes = _each(kernel_size, spatial)
        self.steps = self.sizes if stride is None or stride in ([], ()) else _each(stride, spatial)
        self.sides = _padding(call, padding, list(zip(self.sizes, self.steps, strict=True)))


def _pooled(
    call: Call, input: torch.Tensor, windows: _Windows, ceil_mode: bool, fill: float
) -> tuple[torch.Tensor, list[int]]:
    """The band with what its windows need of others, and the padding that is left to do, the same on both sides."""
    if ceil_mode:
        raise call.refused("with ceil_mode")
    of_each = list(zip(windows.sizes, windows.steps, windows.sides, strict=True))
    local, rest = with_neighbours(
        call, call.open(input), shape_of(input), lambda dim: call.axes_of(input, dim), of_each, fill
    )
    return local, [left for left, _ in rest]


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_average_pool(call: Call, input: torch.Tensor, output_size: Any) -> torch.Tensor:
    spatial = int(call.name[-2])
    if _each(output_size, spatial) == [1] * spatial:
        return mean(call, input, list(range(-spatial, 0)), True)
    cut = call.cut(input)
    if any(dim is not None and dim >= len(shape_of(input)) - spatial for dim in cut):
        raise call.refused("over a dimension that is cut makes averages of size 1 only")
    return call.leave(call.function(call.open(input), output_size), cut)
