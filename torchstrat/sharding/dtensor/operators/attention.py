"""Scaled dot product attention, cut along batches and heads, along the queries, or along the columns of the values."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from torchstrat.sharding.dtensor.operators.contraction import cut_by_labels
from torchstrat.sharding.dtensor.operators.elementwise import own_noise
from torchstrat.sharding.dtensor.operators.rules import Call, rule, shape_of


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

    Keys that are cut are made whole: every query looks at all of them.
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
