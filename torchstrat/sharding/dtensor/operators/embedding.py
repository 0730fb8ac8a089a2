"""Tables of embeddings, cut by rows or by columns; indices may be cut as well."""

from __future__ import annotations

import torch
from torch.nn import functional

from torchstrat.sharding.dtensor.operators.contraction import cut_by_labels
from torchstrat.sharding.dtensor.operators.rules import Call, rule, shape_of


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
    """``weight``: ``(rows, columns)``. A table that is cut by rows answers for its own; the answers are added up."""
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
