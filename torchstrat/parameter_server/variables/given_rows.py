"""Writes to a table on ``meta`` that bring values: which rows get which."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchstrat.errors import UnsupportedError
from torchstrat.parameter_server.variables.cached_tensors import TensorCall


def given_rows(call: TensorCall, table: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Values, and the ids ``(n,)`` of the rows that get them (None: all rows); None for a call that brings no values.

    ``table[ids] = rows`` and ``table.copy_(values)`` do, and ``copy_`` of a view that is made of whole rows. Raises
    `UnsupportedError` naming the table for parts of rows.
    """
    if call.func is torch.Tensor.__setitem__:
        target, index, value = call.args
        if target is not table:
            raise _not_rows(name)
        ids = _rows_at(index, len(table), name)
    elif call.func is torch.Tensor.copy_:
        target, value = call.args[0], call.args[1] if len(call.args) > 1 else call.kwargs["src"]
        ids = None if target is table else _rows_of_view(target, table, name)
    else:
        return None
    value = torch.as_tensor(value, dtype=table.dtype)
    if value.is_meta:
        return None
    shape = tuple(table.shape) if ids is None else (len(ids), *table.shape[1:])
    return value.detach().cpu().expand(shape), ids


def _rows_at(index: Any, rows: int, name: str) -> torch.Tensor | None:
    if isinstance(index, tuple):
        if len(index) != 1 and not all(one is Ellipsis or one == slice(None) for one in index[1:]):
            raise _not_rows(name)
        index = index[0]
    if index is Ellipsis:
        return None
    return torch.arange(rows)[index].reshape(-1)


def _rows_of_view(view: torch.Tensor, table: torch.Tensor, name: str) -> torch.Tensor:
    elements = math.prod(table.shape[1:])
    first, count = view.storage_offset(), view.numel()
    if not elements or first % elements or count % elements or not view.is_contiguous():
        raise _not_rows(name)
    return torch.arange(first // elements, (first + count) // elements)


def _not_rows(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is on meta, so the coordinator has no values of it, and a part of its rows was written. Write whole "
        "rows (table.weight[ids] = rows), all of it (copy_, load_state_dict, nn.init), or in a scheduled function."
    )
