"""Embeddings: rows of a table by id, and rows combined per example, where the table may be in shards.

Tables on parameter servers can be given more rows (`grow_rows`), and asked for those of the next batch while this one
computes (`prefetch_rows`).

To the lookups a table is a `ShardedVariable`, a list of its shards in order, a tensor or parameter ``(rows, …)``, or an
`torch.nn.Embedding` (whose ``sparse`` and ``padding_idx`` hold, and whose own ``max_norm`` does not). Each lookup is
differentiable; the gradient of a shard is a sparse COO tensor of the shard's shape that holds the rows looked up, by
their number in the shard. Repeated ids stand in it repeatedly, and count each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function

from torchstrat.core import context
from torchstrat.core._torch_private import sparse_indices, sparse_values
from torchstrat.core.context import home_of, is_open
from torchstrat.core.errors import ContextError, InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.parameter_server.variables.sharded_indexing import as_ids, check_ids, handle_of, spans_of, split_ids
from torchstrat.parameter_server.variables.sharded_variable import ShardedVariable

if TYPE_CHECKING:
    from torchstrat.core.context import StrategyLike


COMBINERS = ("mean", "sum", "sqrtn")


def embedding_lookup(params: object, ids: object, max_norm: float | None = None) -> torch.Tensor:
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
    params: object, sp_ids: object, sp_weights: object, combiner: str | None = None, max_norm: float | None = None
) -> torch.Tensor:
    """One combination of table rows per example: shape ``(examples,) + row shape``. Examples without ids give zeros.

    Args:
        params: the table.
        sp_ids: the ids of each example: ``(indices, ids, dense_shape)``, a sparse COO tensor whose values are the ids,
            ``(ids, offsets)``, or a jagged nested tensor; see `parse_sparse_ids`.
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
    embedding_weights: object,
    sparse_ids: object,
    sparse_weights: object = None,
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


def lookup_rows(table: object, ids: torch.Tensor) -> torch.Tensor:
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


def grow_rows(
    table: nn.Embedding | nn.EmbeddingBag | torch.Tensor,
    rows: int,
    *,
    init: Callable[[torch.Tensor], object] | None = None,
) -> None:
    """Give an embedding table on parameter servers more rows, while it is trained. Called on the coordinator::

        if max_id >= model.table.num_embeddings:
            ts.grow_rows(model.table, 2 * model.table.num_embeddings)

    Rows that are there stay where they are, with their optimizer state; new ones are behind them, on the server of the
    last ones, with the state of rows that no step has touched. ``table.weight`` stays the same parameter, with another
    shape, here and on workers; ``num_embeddings`` of its modules follows. Works on ``device="meta"``, too.

    It waits until no function is half-way; no update is lost. Functions that are in the queue, and those that run again
    because their worker was lost, find the larger table. A checkpoint of before does not fit afterwards, and is an
    error that says so (``restore(path, strict=False)`` leaves the table out): save one when the table has grown, and
    make the larger table in the program that goes on from it.

    Args:
        table: the module, or its weight. Of a `ParameterServerStrategy`, and stepped by optimizers that treat each row
            by itself (all elementwise ones).
        rows: how many there are then. As many as there are does nothing.
        init: fills the new rows in place, or returns them: ``(new rows, dim)``, on the CPU; for tables on ``meta`` on
            ``meta``, by random or constant fillers. None: as the table's own were filled within the scope
            (``normal_`` by ``nn.Embedding``, or what came after it).

    Raises:
        InvalidArgumentError: fewer rows than there are; how to initialise new ones is not known (rows were copied from
            elsewhere, say), or ``init`` has made others; something here shows the memory of the table; a server has no
            room for them. Nothing has changed.
        UnsupportedError: the table is not on parameter servers; or an optimizer, or another module that has it too,
            depends on the number of rows.
        ContextError: called in a scheduled function, or within a replica.
        CommunicationTimeoutError: functions ran for longer than the strategy's ``timeout``.
        ParameterServerUnavailable: a server is gone.
    """
    weight = table.weight if isinstance(table, nn.Embedding | nn.EmbeddingBag) else table
    if not isinstance(weight, torch.Tensor):
        raise WrongTypeError(
            f"grow_rows got a {type(table).__name__} as table; give it the nn.Embedding or nn.EmbeddingBag, or its "
            "weight."
        )
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise WrongTypeError(f"grow_rows got rows={rows!r:.80}; give it the number of rows that there are to be.")
    if rows < 1:
        raise InvalidArgumentError(f"grow_rows got rows={rows}; tables only grow.")
    if init is not None and not callable(init):
        raise WrongTypeError(f"grow_rows got init={init!r:.80}; give it a function that fills rows.")
    is_worker = home_of(context.get_strategy()).is_worker
    if is_worker or (context.has_strategy() and context.get_replica_context() is not None):
        raise ContextError(
            "grow_rows was called in a scheduled function, or within a replica; call it on the coordinator, between "
            "calls of schedule."
        )
    owner = _owner_of(weight)
    if owner is None or not home_of(owner).grow_rows(weight, rows, init):
        held = "belongs to no strategy" if owner is None else f"belongs to a {type(owner).__name__}"
        raise UnsupportedError(
            f"grow_rows: the table of shape {tuple(weight.shape)} {held}, and tables grow on parameter servers alone. "
            "Save a checkpoint, make the larger table in a new program, restore the rest with strict=False, and copy "
            "the rows: new.weight[:old_rows] = old_weight, within torch.no_grad()."
        )
    if isinstance(table, nn.Embedding | nn.EmbeddingBag):
        table.num_embeddings = rows


def _owner_of(weight: torch.Tensor) -> StrategyLike | None:
    still_open = (one for one in context.strategies if is_open(one))
    return next((one for one in still_open if one.extended.variable_created_in_scope(weight)), None)


def prefetch_rows(table: nn.Embedding | nn.EmbeddingBag | torch.Tensor, ids: torch.Tensor) -> None:
    """Ask for the rows that a coming lookup needs, and return at once: they are gathered while this step goes on.

    For functions that run on a worker of parameter servers, before what takes long, with the ids of the next batch::

        def dataset_fn(context):  # each batch with the one after it
            return itertools.pairwise(itertools.chain(loader, [None]))

        def train_step(batch, following):
            optimizer.zero_grad()
            loss = loss_of(model(batch.ids), batch.labels)
            if following is not None:
                ts.prefetch_rows(model.table, following.ids)
            loss.backward()
            optimizer.step()

    The next lookup of ``table`` in this function or in the next one on this worker takes the rows that were asked for,
    and reads those of its ids that were not. Each request serves one lookup (of several, the one that has most of its
    ids). What no lookup has taken is dropped when the function after the next one begins.

    **The rows are as of the gather**: what was pushed since is not in them, this worker's own last push included. The
    gradients are computed at those values, and applied to the ones that the servers have by then: no update is lost.
    Rows that nobody has pushed to in the meantime are exact. A function that comes to a worker which had nothing to do,
    as the first ones after `ClusterCoordinator.join`, reads everything anew.

    Everywhere but in a function on such a worker, and there for a parameter that is held whole instead of by rows, this
    does nothing: the same step runs under every strategy. Lookups with ``max_norm`` read everything anew, since they
    write rows back. No more than 256 MiB of rows wait on a worker: what was asked for first makes room.

    Args:
        table: The module that looks rows up, or its weight.
        ids: int32 or int64, any shape, on any device. Repetitions are fine. May be changed afterwards.

    Raises:
        InvalidArgumentError: an id is not in the table; nothing was asked for. On a worker; elsewhere ids are not read.
        WrongTypeError: ``table`` or ``ids`` is something else. Everywhere.

    A server that is lost meanwhile is an error of the lookup, not of this call.
    """
    if isinstance(table, nn.Embedding | nn.EmbeddingBag):
        if table.max_norm is not None:
            return
        weight = table.weight
    elif isinstance(table, torch.Tensor):
        weight = table
    else:
        raise WrongTypeError(
            f"prefetch_rows got a {type(table).__name__} as table; give it the nn.Embedding or nn.EmbeddingBag whose "
            "lookup comes next, or its weight."
        )
    if not isinstance(ids, torch.Tensor) or ids.dtype not in ID_DTYPES:
        given = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else f"a {type(ids).__name__}"
        raise WrongTypeError(f"prefetch_rows got {given} as ids; give it a tensor of torch.int32 or torch.int64.")
    if getattr(type(weight), "is_read_by_rows", False):  # others that PyTorch asks would bring all of their values
        handle_torch_function(prefetch_rows, (weight,), weight, ids)


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

    shards: Sequence[object]
    spans: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, params: object) -> _Table:
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


def _checked_ids(given: object, call: str) -> torch.Tensor:
    ids = as_ids(given)
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
    table: _Table, entries: SparseIds, weights: torch.Tensor | None, combiner: str, max_norm: float | None, call: str
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


ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class SparseIds:
    """Ids by row. Entry ``i`` says that row ``rows[i]`` has ``ids[i]``; rows are not sorted.

    ``rows``: ``(n,)`` int64, in ``[0, number of rows)``. ``ids``: ``(n,)`` int32 or int64, any values.
    ``batch_shape``: sizes of the dimensions that the rows are counted through, the last one fastest.
    ``positions``: ``(n, d)`` where the entries were given with their places in a ``d``-dimensional table, else None.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    batch_shape: tuple[int, ...]
    positions: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return math.prod(self.batch_shape)

    def kept(self, where: torch.Tensor) -> SparseIds:
        """Only the entries where ``where``, ``(n,)`` bool, is True."""
        positions = None if self.positions is None else self.positions[where]
        return replace(self, rows=self.rows[where], ids=self.ids[where], positions=positions)


def parse_sparse_ids(given: object, call: str) -> SparseIds:
    """Read ids in any of these forms:

    - ``(indices, ids, dense_shape)``: ``indices`` ``(n, d)``, one position per id; the last dimension counts the ids
      of a row, the others are the rows;
    - a sparse COO tensor whose values are the ids; it is not coalesced, which would add ids up;
    - ``(ids, offsets)``: ``ids`` ``(n,)``, ``offsets`` ``(number of rows,)`` says where each row begins;
    - a jagged nested tensor of ids, one component per row.

    Raises:
        WrongTypeError: none of these, or ids that are not int32 or int64.
        InvalidArgumentError: parts of other shapes, positions outside of the dense shape, offsets that do not ascend.
    """
    if isinstance(given, torch.Tensor) and given.is_nested:
        starts: torch.Tensor = given.offsets()[:-1]  # type: ignore[attr-defined]  # of jagged tensors only
        return _from_offsets(given.values(), starts, call)
    if isinstance(given, torch.Tensor) and given.layout is torch.sparse_coo:
        return _from_positions(sparse_indices(given).T, sparse_values(given), tuple(given.shape), call)
    if isinstance(given, tuple | list) and len(given) == 3:
        indices, ids, shape = given
        sizes = tuple(int(size) for size in (shape.tolist() if isinstance(shape, torch.Tensor) else shape))
        return _from_positions(_tensor(indices, torch.int64), _tensor(ids, torch.int64), sizes, call)
    if isinstance(given, tuple | list) and len(given) == 2:
        ids, offsets = given
        return _from_offsets(_tensor(ids, torch.int64), _tensor(offsets, torch.int64), call)
    shown = f"a tensor of layout {given.layout}" if isinstance(given, torch.Tensor) else type(given).__name__
    raise WrongTypeError(
        f"{call} needs ids as (indices, ids, dense_shape), as a sparse COO tensor or as (ids, offsets); got {shown}. "
        "For a dense tensor of ids use embedding_lookup."
    )


def _tensor(value: object, dtype_if_empty: torch.dtype) -> torch.Tensor:
    """A tensor as it is, numbers as a tensor; no numbers have no dtype of their own."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(value, dtype=dtype_if_empty if isinstance(value, Sequence) and not len(value) else None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0  # of NumPy or torch


def _from_positions(indices: torch.Tensor, ids: torch.Tensor, sizes: tuple[int, ...], call: str) -> SparseIds:
    _check_id_dtype(ids, call)
    if ids.dim() != 1 or len(sizes) < 2:
        raise InvalidArgumentError(
            f"{call} needs ids of shape (n,) in a dense shape of at least two dimensions, rows and ids of a row; got "
            f"shape {tuple(ids.shape)} and dense shape {sizes}."
        )
    indices = indices.to(torch.int64).reshape(-1, len(sizes)) if not indices.numel() else indices.to(torch.int64)
    if indices.shape != (len(ids), len(sizes)):
        raise InvalidArgumentError(
            f"{call} got indices of shape {tuple(indices.shape)} for {len(ids)} ids in dense shape {sizes}; they must "
            f"have shape {(len(ids), len(sizes))}, one position per id."
        )
    outside = ((indices < 0) | (indices >= torch.tensor(sizes, device=indices.device))).any(dim=1).nonzero()
    if len(outside):
        place = int(outside[0])
        raise InvalidArgumentError(
            f"{call}: indices[{place}] is {indices[place].tolist()}, which is not within the dense shape {sizes}."
        )
    rows = torch.zeros_like(ids, dtype=torch.int64)
    for dim, size in enumerate(sizes[:-1]):
        rows = rows * size + indices[:, dim].to(rows.device)
    return SparseIds(rows, ids, sizes[:-1], indices)


def _from_offsets(ids: torch.Tensor, offsets: torch.Tensor, call: str) -> SparseIds:
    _check_id_dtype(ids, call)
    ends = torch.cat([offsets, torch.tensor([len(ids)], dtype=offsets.dtype, device=offsets.device)])
    lengths = ends.diff()
    if ids.dim() != 1 or offsets.dim() != 1 or bool((lengths < 0).any()) or (len(offsets) and int(offsets[0]) != 0):
        raise InvalidArgumentError(
            f"{call} got ids of shape {tuple(ids.shape)} and offsets {offsets.tolist()}; ids must have shape (n,), and "
            "offsets say where each row begins: the first is 0, they ascend, and none is beyond the ids."
        )
    if len(ids) and not len(offsets):
        raise InvalidArgumentError(f"{call} got {len(ids)} ids and no offsets; the first row begins at offset 0.")
    rows = torch.repeat_interleave(torch.arange(len(offsets), device=ids.device), lengths.to(ids.device))
    return SparseIds(rows, ids, (len(offsets),))


def _check_id_dtype(ids: torch.Tensor, call: str) -> None:
    if ids.dtype not in ID_DTYPES:
        raise WrongTypeError(f"{call} needs ids of int32 or int64; got {ids.dtype}. Convert them with .long().")


def parse_weights(given: object, entries: SparseIds, call: str) -> torch.Tensor:
    """The weight of each id, ``(n,)``: a dense tensor of n values, or the forms of ids that carry positions, with the
    same positions in the same order.

    Raises:
        WrongTypeError: the weights are no numbers.
        InvalidArgumentError: another number of weights than of ids, or other positions.
    """
    positions = None
    if isinstance(given, tuple | list) and len(given) == 3 and not all(map(_is_number, given)):
        positions, values = _tensor(given[0], torch.int64), _tensor(given[1], torch.float32)
    elif isinstance(given, torch.Tensor) and given.layout is torch.sparse_coo:
        positions, values = sparse_indices(given).T, sparse_values(given)
    elif isinstance(given, torch.Tensor) and given.is_nested:
        values = given.values()
    else:
        try:
            values = _tensor(given, torch.float32)
        except (TypeError, ValueError, RuntimeError):
            raise WrongTypeError(
                f"{call} needs one weight per id: a tensor, (indices, weights, dense_shape) or a sparse COO tensor; "
                f"got {type(given).__name__}."
            ) from None
    if values.shape != entries.ids.shape:
        raise InvalidArgumentError(
            f"{call} got weights of shape {tuple(values.shape)} for ids of shape {tuple(entries.ids.shape)}; every id "
            "needs one weight."
        )
    known = entries.positions
    if (
        positions is not None
        and known is not None
        and positions.numel()
        and not torch.equal(positions.to(known), known)
    ):
        raise InvalidArgumentError(
            f"{call} got weights at other positions than the ids; the weights' indices must equal the ids', in the "
            "same order."
        )
    return values
