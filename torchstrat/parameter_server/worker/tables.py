"""Embedding tables in a step: ``F.embedding`` and ``F.embedding_bag`` look rows up on the servers.

A table's parameter has its full shape and no storage. While a function runs, a function mode sees what is done with it:
a lookup reads the unique rows that the batch names and computes on these; its gradient is a sparse COO tensor over the
table, as that of ``nn.Embedding(sparse=True)`` is. Any other use reads the whole table once, and from then on this
worker holds it like any other parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchstrat import row_prefetch
from torchstrat._torch_private import DisableTorchFunction, foreach_norm
from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.variables.variable_access import VariableAccess
from torchstrat.parameter_server.warm_up import uncompiled
from torchstrat.parameter_server.worker.copies import Copies
from torchstrat.parameter_server.worker.row_gradients import NOT_FOR_SPARSE, SHOWS_GRADIENT, RowGradients
from torchstrat.parameter_server.worker.table_rows import Rows, TableRows
from torchstrat.parameter_server.worker.watched_parameter import WatchedParameter

_LARGE_BYTES = 64 << 20


class _RowsOfTable(torch.autograd.Function):
    """Rows that were read from the servers, as a function of the table's parameter."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.shape = table.shape
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
        ctx: Any, table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, padding: int | None
    ) -> torch.Tensor:
        ctx.table_shape, ctx.rows_shape, ctx.padding = table.shape, rows.shape, padding
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


class TableLookups(TorchFunctionMode):
    """Active around a function that reaches tables. One for all functions of a worker."""

    def __init__(self, copies: Copies, access: VariableAccess, table_rows: TableRows) -> None:
        super().__init__()
        self._copies = copies
        self._access = access
        self._table_rows = table_rows
        self._gradients = RowGradients(copies.tables)
        # The step may be compiled, and this is in the middle of it.
        self._make_dense = uncompiled(self._make_dense_now)
        self._rows = uncompiled(self._rows_now)
        self._look_up = uncompiled(self._look_up_now)
        self._prefetch = uncompiled(self._prefetch_now)

    def __enter__(self) -> TableLookups:
        super().__enter__()  # type: ignore[no-untyped-call]
        row_prefetch.here.prefetch = self._prefetch
        self._gradients.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        row_prefetch.here.prefetch = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lookup = _LOOKUPS.get(func)
        if lookup is not None:
            return lookup(self, *args, **kwargs)
        if func in SHOWS_GRADIENT and self._gradients.is_one(self._gradients.current(args[0])):
            return self._gradients.shown(func, args[0])
        if getattr(func, "__name__", "") not in _ATTRIBUTES:
            self._make_dense_where_used(args, kwargs)
        if self._gradients.became:
            args, kwargs = self._with_current_gradients(args, kwargs)
        try:
            return func(*args, **kwargs)
        except NOT_FOR_SPARSE:
            if not self._gradients.make_dense((*args, *kwargs.values())):
                raise
        args, kwargs = self._with_current_gradients(args, kwargs)
        return func(*args, **kwargs)

    def _with_current_gradients(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        current = self._gradients.current
        return tuple(map(current, args)), {name: current(value) for name, value in kwargs.items()}

    def _make_dense_where_used(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if type(tensor) is WatchedParameter and self._copies.is_table(tensor):
                    self._make_dense(tensor)

    def _make_dense_now(self, tensor: torch.Tensor) -> None:
        spec = self._copies.spec_of(tensor)
        assert spec is not None
        size = tensor.numel() * tensor.element_size()
        if size > _LARGE_BYTES:
            warnings.warn(
                f"table {spec.name} {spec.shape} is used as a whole, not only by F.embedding or F.embedding_bag, so "
                f"every worker holds all of its {size / 2**20:.0f} MiB and sends its whole gradient. Look rows up "
                "instead, or create it without a partitioner.",
                stacklevel=4,
            )
        self._copies.make_dense(tensor)

    # -- lookups ----------------------------------------------------------------------------------------------------

    def embedding(
        self,
        input: torch.Tensor,  # noqa: A002  # torch's name
        weight: torch.Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        if not self._copies.is_table(weight):
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        self._gradients.note(weight, sparse)
        if weight.device.type == "cpu" and not scale_grad_by_freq:
            return self._look_up(weight, input, padding_idx, max_norm, norm_type)  # type: ignore[no-any-return]
        ids, places, rows = self._rows(weight, input, max_norm, norm_type)
        padding = _place_of(padding_idx, ids, len(weight))
        return F.embedding(places, rows, padding, scale_grad_by_freq=scale_grad_by_freq)

    def embedding_bag(
        self,
        input: torch.Tensor,  # noqa: A002
        weight: torch.Tensor,
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
        def call(ids: torch.Tensor, rows: torch.Tensor, padding: int | None, norm: float | None, by_rows: bool) -> Any:
            return F.embedding_bag(
                ids, rows, offsets, norm, norm_type, scale_grad_by_freq, mode, by_rows, per_sample_weights,
                include_last_offset, padding,
            )  # fmt: skip

        if not self._copies.is_table(weight):
            return call(input, weight, padding_idx, max_norm, sparse)  # type: ignore[no-any-return]
        self._gradients.note(weight, sparse)
        ids, places, rows = self._rows(weight, input, max_norm, norm_type)
        return call(places, rows, _place_of(padding_idx, ids, len(weight)), None, False)  # type: ignore[no-any-return]

    def _prefetch_now(self, table: torch.Tensor, ids: torch.Tensor) -> None:
        if self._copies.is_table(table):
            spec = self._copies.spec_of(table)
            assert spec is not None
            with DisableTorchFunction():
                self._table_rows.prefetch(spec, ids)

    def _rows_now(
        self, table: torch.Tensor, ids: torch.Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The unique ids on the CPU, where each of ``ids`` is among them, and the rows ``(unique, dim)``."""
        unique, places, rows = self._read(table, ids, max_norm, norm_type)
        rows = rows.to(table.device)
        if table.requires_grad and torch.is_grad_enabled():
            rows = _RowsOfTable.apply(table, unique.to(table.device), rows)  # type: ignore[no-untyped-call]
        return unique, places, rows

    def _look_up_now(
        self, table: torch.Tensor, ids: torch.Tensor, padding_idx: int | None, max_norm: float | None, norm_type: float
    ) -> torch.Tensor:
        """All of a lookup in a table on the CPU."""
        unique, places, rows = self._read(table, ids, max_norm, norm_type)
        padding = _place_of(padding_idx, unique, len(table))
        return _Lookup.apply(table, unique, rows, places, padding)  # type: ignore[no-any-return,no-untyped-call]

    def _read(self, table: torch.Tensor, ids: torch.Tensor, max_norm: float | None, norm_type: float) -> Rows:
        spec = self._copies.spec_of(table)
        assert spec is not None
        # max_norm writes rows back: it must not take any from before the last push.
        found = self._table_rows.read(spec, ids, fresh=max_norm is not None)
        if max_norm is not None:
            self._renormalise(spec, found.ids, found.values, max_norm, norm_type)
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


_LOOKUPS: dict[Any, Callable[..., Any]] = {
    F.embedding: TableLookups.embedding,
    F.embedding_bag: TableLookups.embedding_bag,
    torch.linalg.vector_norm: lambda self, *args, **kwargs: self._gradients.vector_norm(*args, **kwargs),
    foreach_norm: lambda self, *args, **kwargs: self._gradients.foreach_norm(*args, **kwargs),
    torch.Tensor.clamp_: lambda self, *args, **kwargs: self._gradients.clamp_(*args, **kwargs),
}
"""Also what is done with gradients of tables, and not by PyTorch."""

_ATTRIBUTES = frozenset(
    {
        "__get__",
        "__set__",
        "__delete__",
        "__hash__",
        "__len__",
        "__repr__",
        "size",
        "dim",
        "numel",
        "element_size",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "get_device",
        "requires_grad_",
        "retain_grad",
        "backward",
        "register_hook",
        "register_post_accumulate_grad_hook",
    }
)
"""What may be asked of a table without its values."""
