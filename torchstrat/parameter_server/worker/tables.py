"""Embedding tables in a step: ``F.embedding`` and ``F.embedding_bag`` look rows up on the servers.

A lookup in a `TableParameter` reads the unique rows that the batch names and computes on these; its gradient is a
sparse COO tensor over the table, as that of ``nn.Embedding(sparse=True)`` is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.variables.remote_access import VariableAccess
from torchstrat.parameter_server.worker.pending import refuse_in_a_fork
from torchstrat.parameter_server.worker.table_rows import Rows, TableRows

if TYPE_CHECKING:
    from torchstrat.parameter_server.worker.table_parameter import TableParameter


class _RowsOfTable(torch.autograd.Function):
    """Rows that were read from the servers, as a function of the table's parameter."""

    @staticmethod
    def forward(ctx: Any, table: TableParameter, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.shape = table.spec.shape
        ctx.save_for_backward(ids)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        sparse = torch.sparse_coo_tensor(ids[None], gradient, ctx.shape, is_coalesced=True, check_invariants=False)
        return sparse, None, None


class _Lookup(torch.autograd.Function):
    """The same with the lookup among the rows, on the CPU. PyTorch's own way back from a lookup clears, sorts and adds
    in three times the time."""

    @staticmethod
    def forward(
        ctx: Any,
        table: TableParameter,
        ids: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        padding: int | None,
    ) -> torch.Tensor:
        ctx.table_shape, ctx.rows_shape, ctx.padding = table.spec.shape, rows.shape, padding
        ctx.save_for_backward(ids, places)
        return F.embedding(places, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        ids, places = ctx.saved_tensors
        sums = gradient.new_zeros(ctx.rows_shape)
        # Twice as fast as index_add_.
        sums.scatter_add_(0, places.reshape(-1, 1).expand(-1, sums.shape[1]), gradient.reshape(-1, sums.shape[1]))
        if ctx.padding is not None:
            sums[ctx.padding] = 0
        sparse = torch.sparse_coo_tensor(ids[None], sums, ctx.table_shape, is_coalesced=True, check_invariants=False)
        return sparse, None, None, None, None


class TableLookups:
    """Of one worker; on any thread."""

    def __init__(self, access: VariableAccess) -> None:
        self.rows = TableRows(access)
        self._access = access
        self._pid = os.getpid()

    def embedding(
        self,
        input: torch.Tensor,  # noqa: A002  # torch's name
        weight: TableParameter,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        weight.rows_asked_for_sparse = sparse
        if weight.device.type == "cpu" and not scale_grad_by_freq:
            return self._look_up(weight, input, padding_idx, max_norm, norm_type)
        ids, places, rows = self._rows(weight, input, max_norm, norm_type)
        padding = _place_of(padding_idx, ids, weight.spec.shape[0])
        return F.embedding(places, rows, padding, scale_grad_by_freq=scale_grad_by_freq)

    def embedding_bag(
        self,
        input: torch.Tensor,  # noqa: A002
        weight: TableParameter,
        offsets: torch.Tensor | None = None,
        max_norm: float | None = None,
        norm_type: float = 2,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> torch.Tensor:
        weight.rows_asked_for_sparse = sparse
        ids, places, rows = self._rows(weight, input, max_norm, norm_type)
        return F.embedding_bag(
            places, rows, offsets, None, norm_type, scale_grad_by_freq, mode, False, per_sample_weights,
            include_last_offset, _place_of(padding_idx, ids, weight.spec.shape[0]),
        )  # fmt: skip

    def prefetch(self, table: TableParameter, ids: torch.Tensor) -> None:
        if not table.is_current:
            self.rows.prefetch(table.spec, ids)

    def _rows(
        self, table: TableParameter, ids: torch.Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The unique ids on the CPU, where each of ``ids`` is among them, and the rows ``(unique, dim)``."""
        unique, places, rows = self._read(table, ids, max_norm, norm_type)
        rows = rows.to(table.device)
        if table.requires_grad and torch.is_grad_enabled():
            rows = _RowsOfTable.apply(table, unique.to(table.device), rows)  # type: ignore[no-untyped-call]
        return unique, places, rows

    def _look_up(
        self,
        table: TableParameter,
        ids: torch.Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
    ) -> torch.Tensor:
        """All of a lookup in a table on the CPU."""
        unique, places, rows = self._read(table, ids, max_norm, norm_type)
        padding = _place_of(padding_idx, unique, table.spec.shape[0])
        return _Lookup.apply(table, unique, rows, places, padding)  # type: ignore[no-any-return,no-untyped-call]

    def _read(self, table: TableParameter, ids: torch.Tensor, max_norm: float | None, norm_type: float) -> Rows:
        refuse_in_a_fork(self._pid)
        spec = table.spec
        table.reach()
        # A table that this function uses as a whole, too, has the values of that, and what was written to them.
        whole = table.memory if table.is_current else None
        # max_norm writes rows back: it must not take any from before the last push.
        found = self.rows.read(spec, ids, fresh=max_norm is not None, whole=whole)
        if max_norm is not None:
            self._renormalise(spec, found.ids, found.values, max_norm, norm_type)
            if whole is not None:
                table.put_rows(found.ids, found.values)
        return found

    def _renormalise(
        self, spec: VariableSpec, ids: torch.Tensor, rows: torch.Tensor, max_norm: float, norm_type: float
    ) -> None:
        """``max_norm`` changes the table itself, as torch's lookups do: rows that are too long are written back."""
        norms = torch.linalg.vector_norm(rows, norm_type, dim=1)
        long = norms > max_norm
        if bool(long.any()):
            rows[long] *= (max_norm / (norms[long] + 1e-7)).unsqueeze(1)
            self._access.edit(spec, "assign", rows[long], ids[long])


def _place_of(padding_idx: int | None, ids: torch.Tensor, rows: int) -> int | None:
    """Where the padding row is among the unique ids; None when the batch does not name it."""
    if padding_idx is None:
        return None
    wanted = padding_idx + rows if padding_idx < 0 else padding_idx
    place = int(torch.searchsorted(ids, wanted))
    return place if place < len(ids) and int(ids[place]) == wanted else None
