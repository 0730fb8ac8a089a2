"""Writing rows of a table, each as one run of bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from torchstrat.tensor_bytes import bytes_of


def put_rows(table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """``table[ids] = rows``, in place, without a graph. On the CPU.

    `torch.Tensor.index_copy_` writes element by element. NumPy, told that a row is one element, takes a third of the
    time: 5,400 rows of 256 bytes, in no cache, 0.36 ms instead of 1.0. It lets go of the interpreter, too.

    Args:
        table: ``(rows, …)``.
        ids: ``(n,)`` int64, unique, in the table.
        rows: ``(n, …)``, of the table's dtype.
    """
    table, rows = table.detach(), rows.detach()
    size = table.element_size() * table[:1].numel()
    are_alike = rows.dtype == table.dtype and rows.shape[1:] == table.shape[1:]
    if size == 0 or not are_alike or not table.is_contiguous() or table.is_complex():
        table.index_copy_(0, ids, rows)
        return
    _as_bytes(table, size)[ids.numpy()] = _as_bytes(rows.contiguous(), size)
    if not table.is_inference():
        increment_version(table)  # PyTorch has not seen it


def _as_bytes(tensor: torch.Tensor, size: int) -> Any:
    """``(rows,)`` of elements of ``size`` bytes, in the same memory."""
    return bytes_of(tensor).numpy().view(f"V{size}")
