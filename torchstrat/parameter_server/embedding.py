"""Rows of a table by id, and rows combined per example, where the table may be in shards.

A table is a `ShardedVariable`, a list of its shards in order, a tensor or parameter ``(rows, …)``, or an
`torch.nn.Embedding` (whose ``sparse`` and ``padding_idx`` hold, and whose own ``max_norm`` does not). Each lookup is
differentiable; the gradient of a shard is a sparse COO tensor of the shard's shape that holds the rows looked up, by
their number in the shard. Repeated ids stand in it repeatedly, and count each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.sparse_ids import ID_DTYPES, SparseIds, parse_sparse_ids, parse_weights
from torchstrat.parameter_server.variables.sharded_indexing import check_ids, handle_of, spans_of, split_ids
from torchstrat.parameter_server.variables.sharded_variable import ShardedVariable

COMBINERS = ("mean", "sum", "sqrtn")


def embedding_lookup(params: Any, ids: Any, max_norm: float | None = None) -> torch.Tensor:
    """The rows ``ids`` of a table, in the order of the ids: shape ``ids.shape + row shape``.

    Args:
        params: the table.
        ids: int32 or int64, any shape, on any device; repetitions are fine.
        max_norm: rows whose L2 norm is above are scaled down to it. The table itself is not changed.

    Raises:
        InvalidArgumentError: an id outside of ``[0, rows)`` (then nothing was looked up), or a ``max_norm`` that is not
            positive. The first is an `IndexError` as well.
        WrongTypeError: ids of another dtype, or a table that is none.
    """
    table = _Table.of(params)
    ids = _checked_ids(ids, "embedding_lookup")
    check_ids(ids, table.rows, "embedding_lookup")
    rows = _clipped(table.lookup(ids.reshape(-1)), max_norm)
    return rows.reshape(*ids.shape, *rows.shape[1:])


def embedding_lookup_sparse(
    params: Any, sp_ids: Any, sp_weights: Any, combiner: str | None = None, max_norm: float | None = None
) -> torch.Tensor:
    """One combination of table rows per example: shape ``(examples,) + row shape``. Examples without ids give zeros.

    Args:
        params: the table.
        sp_ids: the ids of each example: ``(indices, ids, dense_shape)``, a sparse COO tensor whose values are the ids,
            ``(ids, offsets)``, or a jagged nested tensor; see `torchstrat.core.sparse_ids.parse_sparse_ids`.
        sp_weights: a weight w per id: values in the order of the ids, ``(indices, weights, dense_shape)``, or a sparse
            COO tensor, with the ids' positions; None: all are 1.
        combiner: ``"sum"``: Σ w·row; ``"mean"`` (the default): that over Σ w; ``"sqrtn"``: that over √Σ w². An example
            for which the divisor is 0 gives zeros.
        max_norm: rows whose L2 norm is above are scaled down to it, before they are combined.

    Raises:
        InvalidArgumentError: another combiner, ids outside of ``[0, rows)``, weights that do not match the ids.
        WrongTypeError: arguments of other types.
    """
    call = "embedding_lookup_sparse"
    kind, table, entries = _combiner(combiner, call), _Table.of(params), parse_sparse_ids(sp_ids, call)
    weights = None if sp_weights is None else parse_weights(sp_weights, entries, call)
    return _combined(table, entries, weights, kind, max_norm, call)


def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str | None = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
) -> torch.Tensor:
    """`embedding_lookup_sparse` for ids as they come: ids below 0 and, but for sums, weights up to 0 are left out.

    The result has shape ``dense_shape[:-1] + row shape``.

    Args:
        default_id: examples without any id that counts give this row of the table; None: zeros.

    Raises:
        InvalidArgumentError: as `embedding_lookup_sparse`; ids at or above the number of rows are not left out.
    """
    call = "safe_embedding_lookup_sparse"
    kind, table, entries = _combiner(combiner, call), _Table.of(embedding_weights), parse_sparse_ids(sparse_ids, call)
    weights = None if sparse_weights is None else parse_weights(sparse_weights, entries, call)
    if default_id is not None:
        check_ids(torch.tensor(default_id), table.rows, f"default_id of {call}")
    counts = entries.ids >= 0
    if weights is not None and kind != "sum":
        counts = counts & (weights > 0).to(counts.device)
    entries, weights = entries.kept(counts), None if weights is None else weights[counts.to(weights.device)]
    if default_id is not None:
        entries, weights = _with_default(entries, weights, default_id)
    return _combined(table, entries, weights, kind, max_norm, call)


def lookup_rows(table: Any, ids: torch.Tensor) -> torch.Tensor:
    """The one place where rows are read: ``ids`` ``(n,)`` int64 of one shard, or of a whole table, → ``(n, …)``.

    Every shard is asked, also for no rows, so that each has a gradient.
    """
    if isinstance(table, torch.nn.Embedding):
        return F.embedding(ids.to(table.weight.device), table.weight, table.padding_idx, sparse=table.sparse)
    if not isinstance(table, torch.Tensor):
        return handle_of(table).read_rows(ids)
    ids = ids.to(table.device)
    if not (table.requires_grad and table.is_leaf):  # what a table was computed from may take dense gradients only
        return F.embedding(ids, table) if table.dim() == 2 else table.index_select(0, ids)
    if table.dim() == 2:
        return F.embedding(ids, table, sparse=True)
    rows: torch.Tensor = _RowsOfAnyShape.apply(table, ids)  # type: ignore[no-untyped-call]  # so torch has it
    return rows


class _RowsOfAnyShape(torch.autograd.Function):
    """What `F.embedding` does, for rows that are no vectors."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.table_shape = table.shape
        return table.index_select(0, ids)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ids,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(ids[None], grad, ctx.table_shape, check_invariants=False), None


@dataclass(frozen=True)
class _Table:
    """``shards``: what `lookup_rows` reads, in order; ``spans``: the rows of each."""

    shards: Sequence[Any]
    spans: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, params: Any) -> _Table:
        if isinstance(params, torch.nn.Embedding):
            return cls((params,), ((0, params.num_embeddings),))
        if isinstance(params, ShardedVariable):
            return cls(params.variables, params.row_spans)
        if isinstance(params, list | tuple) and params:
            return cls(params, spans_of([handle_of(shard) for shard in params]))
        if isinstance(params, torch.Tensor):
            if params.dim() == 0 or params.layout is not torch.strided:
                raise InvalidArgumentError(
                    f"a table needs rows; got a tensor of shape {tuple(params.shape)} and layout {params.layout}."
                )
            return cls((params,), ((0, len(params)),))
        try:
            return cls((params,), ((0, handle_of(params).shape[0]),))
        except WrongTypeError:
            raise WrongTypeError(
                "a table is a ShardedVariable, a list of shards, a tensor or an nn.Embedding; got "
                f"{type(params).__name__} {params!r:.80}."
            ) from None

    @property
    def rows(self) -> int:
        return self.spans[-1][1]

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by id, ``(n,)`` in range → ``(n, …)``, in the order of the ids."""
        if len(self.shards) == 1:
            return lookup_rows(self.shards[0], ids.long())
        places, parts = [], []
        for shard, (place, local) in zip(self.shards, split_ids(ids, self.spans), strict=True):
            places.append(place)
            parts.append(lookup_rows(shard, local))
        device = parts[0].device
        # Position i of the result is where place i stands among all the places.
        order = torch.argsort(torch.cat(places).to(device))
        return torch.cat([part.to(device) for part in parts]).index_select(0, order)


def _checked_ids(given: Any, call: str) -> torch.Tensor:
    ids: torch.Tensor = torch.as_tensor(given)
    if not isinstance(given, torch.Tensor) and not ids.numel():
        ids = ids.long()  # no numbers have no dtype of their own
    if ids.dtype not in ID_DTYPES or ids.layout is not torch.strided:
        raise WrongTypeError(
            f"{call} needs a dense tensor of int32 or int64 ids; got {ids.dtype} in layout {ids.layout}. Convert the "
            "ids with .long(); for sparse ids use embedding_lookup_sparse."
        )
    return ids


def _clipped(rows: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    if max_norm is None:
        return rows
    if not max_norm > 0:
        raise InvalidArgumentError(f"max_norm={max_norm} must be positive, or None for rows as they are.")
    norms: torch.Tensor = torch.linalg.vector_norm(rows.unsqueeze(-1).flatten(1), dim=1)
    # At max_norm itself the gradient is the longer rows', as TensorFlow's; clamp's is that up to torch 2.13 only.
    longest = norms.masked_fill(norms < max_norm, max_norm)
    return rows * (max_norm / _column(longest, rows.dim()))


def _combiner(combiner: str | None, call: str) -> str:
    if combiner is None:
        return "mean"
    if combiner not in COMBINERS:
        raise InvalidArgumentError(f"{call} got combiner={combiner!r}; it must be one of {', '.join(COMBINERS)}.")
    return combiner


def _with_default(
    entries: SparseIds, weights: torch.Tensor | None, default_id: int
) -> tuple[SparseIds, torch.Tensor | None]:
    """An entry of weight 1 for each row that has none."""
    empty = torch.ones(entries.num_rows, dtype=torch.bool, device=entries.rows.device)
    empty[entries.rows] = False
    rows = empty.nonzero().flatten()
    filled = SparseIds(
        torch.cat([entries.rows, rows]),
        torch.cat([entries.ids, torch.full_like(rows, default_id, dtype=entries.ids.dtype)]),
        entries.batch_shape,
    )
    return filled, None if weights is None else torch.cat([weights, weights.new_ones(len(rows))])


def _combined(
    table: _Table,
    entries: SparseIds,
    weights: torch.Tensor | None,
    combiner: str,
    max_norm: float | None,
    call: str,
) -> torch.Tensor:
    check_ids(entries.ids, table.rows, call)
    rows = _clipped(table.lookup(entries.ids), max_norm)
    where = entries.rows.to(rows.device)
    per_entry = rows.new_ones(len(rows)) if weights is None else weights.to(rows)
    row_shape = rows.shape[1:]
    total = rows.new_zeros(entries.num_rows, *row_shape)
    total = total.index_add(0, where, rows * _column(per_entry, rows.dim()))
    if combiner != "sum":
        parts = per_entry if combiner == "mean" else per_entry.square()
        divisor = rows.new_zeros(entries.num_rows).index_add(0, where, parts)
        nothing = divisor == 0
        # Replaced before the root and the division, whose derivatives at 0 are not finite.
        divisor = divisor.masked_fill(nothing, 1)
        divisor = divisor if combiner == "mean" else divisor.sqrt()
        total = (total / _column(divisor, rows.dim())).masked_fill(_column(nothing, rows.dim()), 0)
    return total.reshape(*entries.batch_shape, *row_shape)


def _column(values: torch.Tensor, dims: int) -> torch.Tensor:
    """``(n,)`` → ``(n, 1, …)`` with that many dimensions."""
    return values.reshape(-1, *[1] * (dims - 1))
