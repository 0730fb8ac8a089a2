"""Which rows of a table a call of PyTorch's looks at, or assigns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_functions import tensors_in
from torchstrat.parameter_server.variables.cached_parameter import TensorCall


def read_rows(call: TensorCall, table: torch.Tensor) -> torch.Tensor | None:
    """The ids of the rows of ``table`` that a call looks at, sorted and unique; None for one that may look at all.

    ``table[ids]`` and lookups do. Ids that are out of range are the call's own error.
    """
    arguments = [*call.args, *call.kwargs.values()]
    if sum(one is table for one in tensors_in(arguments)) != 1:
        return None
    if call.func is torch.Tensor.__getitem__ and call.args[0] is table:
        index = call.args[1]  # of one number: a view, by which somebody may write
        ids = torch.as_tensor(index) if isinstance(index, list | torch.Tensor) else None
    elif call.func in (F.embedding, F.embedding_bag):
        ids = call.args[0] if call.args else call.kwargs["input"]
    else:
        return None
    if ids is None or ids.dtype not in _OF_IDS or (ids.dim() == 0 and call.func is torch.Tensor.__getitem__):
        return None
    ids = ids.detach().reshape(-1).cpu().to(torch.int64)
    ids = torch.where(ids < 0, ids + len(table), ids) if call.func is torch.Tensor.__getitem__ else ids
    ids = ids[(ids >= 0) & (ids < len(table))]
    return torch.unique(ids)  # type: ignore[no-any-return]


_OF_IDS = (torch.int64, torch.int32)


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
