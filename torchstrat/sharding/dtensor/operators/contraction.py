"""Sums of products: linear layers, matrix products, attention, and rows of tables (products with one-hot rows).

Each dimension of the operands and the result has a label, and each axis cuts one label, in every tensor that has it;
one that the result lacks (the *inner* dimension) leaves parts to be added up. Where operands disagree about an axis,
the smaller one is made whole along it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from torchstrat.sharding.dtensor.devices import Cut
from torchstrat.sharding.dtensor.operators.elementwise import own_noise
from torchstrat.sharding.dtensor.operators.rules import Call, rule, shape_of

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
