"""Which rows an index of a `ShardedVariable` needs, where they are, and what it needs of a shard, wherever that lives.

``variable[key]`` is what the whole tensor gives for ``key``. Only the rows that the key's first dimension names are
read: `parse_key` splits a key into those rows and the key that is left to apply to them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.variable.variable import Variable, storage_of
from torchstrat.parameter_server.messages import EditOp
from torchstrat.parameter_server.variables.edits import apply_edit

RowSpan = tuple[int, int]
"""The rows ``[start, stop)`` of the whole variable that one shard holds."""


class ShardIndexError(InvalidArgumentError, IndexError):
    """An index of a `ShardedVariable`, or an id of a lookup, is out of range; or it has too many dimensions."""


@dataclass(frozen=True)
class RowSelection:
    """``rows``: of the whole variable, those to read, in order; a range, or a mask's rows as ``(n,)`` int64.
    ``key``: what is left to apply to the tensor of these rows."""

    rows: range | torch.Tensor
    key: tuple[Any, ...]


def parse_key(key: object, rows: int) -> RowSelection:
    """Split the index of a variable with that many rows.

    Keys are integers, slices with positive steps, boolean masks, ``...`` and None, or tuples of them.

    Raises:
        WrongTypeError: another kind of index; tensors and lists of row numbers among them.
        ShardIndexError: a row that does not exist, or an empty tuple.
        InvalidArgumentError: a step that is not positive; a single bool.
    """
    entries = key if isinstance(key, tuple) else (key,)
    if not entries:
        raise ShardIndexError("a ShardedVariable cannot be indexed with an empty tuple; v[...] is the whole value.")
    for entry in entries:
        _check_entry(entry)
    lead = next((place for place, entry in enumerate(entries) if entry is not None), len(entries))
    new_dims, head, tail = entries[:lead], entries[lead : lead + 1], entries[lead + 1 :]
    if not head or head[0] is Ellipsis:
        return RowSelection(range(rows), entries)
    if isinstance(head[0], slice):
        chosen = range(*head[0].indices(rows))
        return RowSelection(chosen, (*new_dims, slice(None), *tail))
    if _is_mask(head[0]):
        return _masked(torch.as_tensor(head[0]), rows, entries)
    row = _row_in_range(operator.index(head[0]), rows)
    return RowSelection(range(row, row + 1), (*new_dims, 0, *tail))


def _masked(mask: torch.Tensor, rows: int, entries: tuple[object, ...]) -> RowSelection:
    if mask.shape[0] != rows:
        raise ShardIndexError(
            f"a mask of shape {tuple(mask.shape)} cannot select from {rows} rows; its first dimension must be {rows}."
        )
    if len(entries) == 1 and mask.dim() == 1:
        return RowSelection(mask.nonzero().flatten(), ())
    return RowSelection(range(rows), entries)


def _row_in_range(row: int, rows: int) -> int:
    if not -rows <= row < rows:
        raise ShardIndexError(f"row {row} is out of range: the variable has {rows} rows, {-rows} to {rows - 1}.")
    return row % rows


def _is_mask(entry: object) -> bool:
    return (isinstance(entry, torch.Tensor) and entry.dtype == torch.bool) or (
        isinstance(entry, np.ndarray) and entry.dtype == np.bool_
    )


def _check_entry(entry: Any) -> None:
    if isinstance(entry, slice):
        _check_slice(entry)
    elif isinstance(entry, bool | np.bool_) or (_is_mask(entry) and entry.ndim == 0):
        raise InvalidArgumentError(
            f"a ShardedVariable cannot be indexed with a single bool, {entry!r}; a mask has one bool per row."
        )
    elif not (entry is None or entry is Ellipsis or isinstance(entry, int | np.integer) or _is_mask(entry)):
        raise WrongTypeError(
            f"a ShardedVariable is indexed with integers, slices, boolean masks, ... and None; got "
            f"{type(entry).__name__} {entry!r:.80}. For rows by number use embedding_lookup(v, ids), for other indices "
            "torch.as_tensor(v)[…]."
        )


def _check_slice(entry: slice) -> None:
    for name in ("start", "stop", "step"):
        bound = getattr(entry, name)
        if bound is not None and not isinstance(bound, int | np.integer):
            raise WrongTypeError(
                f"a slice of a ShardedVariable needs whole numbers; got {name}={type(bound).__name__} {bound!r:.80}. "
                "Write int(…) around it."
            )
    if entry.step is not None and entry.step <= 0:
        raise InvalidArgumentError(
            f"a slice of a ShardedVariable has step {entry.step}; as for tensors it must be positive. For the reverse "
            "order use torch.flip."
        )


def split_range(rows: range, spans: Sequence[RowSpan]) -> Iterator[tuple[int, range]]:
    """The shards that hold some of ``rows``, in order, each with its own rows by local number."""
    for shard, (start, stop) in enumerate(spans):
        # Which entries of the range lie in the span: its k-th is rows.start + k * rows.step.
        first = max(0, -(-(start - rows.start) // rows.step))
        last = min(len(rows), -(-(stop - rows.start) // rows.step))
        if first < last:
            mine = rows[first:last]
            yield shard, range(mine.start - start, mine.stop - start, mine.step)


def split_ids(ids: torch.Tensor, spans: Sequence[RowSpan]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For every shard: where in ``ids``, ``(n,)`` and in range, its rows stand, and their local numbers; both int64.

    Order and repetitions are kept.
    """
    stops = torch.tensor([stop for _, stop in spans], device=ids.device)
    shard_of = torch.searchsorted(stops, ids.long(), right=True)
    for shard, (start, _) in enumerate(spans):
        places = (shard_of == shard).nonzero().flatten()
        yield places, ids.index_select(0, places).long() - start


def as_ids(given: object) -> torch.Tensor:
    """``given`` as a tensor; no numbers, which have no dtype of their own, as int64."""
    ids: torch.Tensor = torch.as_tensor(given)
    return ids if isinstance(given, torch.Tensor) or ids.numel() else ids.long()


def check_ids(ids: torch.Tensor, rows: int, call: str) -> None:
    """Raise `ShardIndexError`, which names the first bad id and its place, unless all are in ``[0, rows)``."""
    bad = ((ids < 0) | (ids >= rows)).nonzero()
    if len(bad):
        place = tuple(bad[0].tolist())
        shown = f"ids[{', '.join(map(str, place))}]" if place else "the id"
        raise ShardIndexError(
            f"{call}: {shown} is {int(ids[place])}, which is not in [0, {rows}), the rows of the table "
            f"({len(bad)} of {ids.numel()} ids are out of range)."
        )


@runtime_checkable
class ShardHandle(Protocol):
    """Reads and edits one shard. An object that has these members can itself be a shard of a `ShardedVariable`.

    Values that it returns do not alias the shard where ``read_rows`` made them; ``read`` may lend the shard itself,
    which its caller does not write to. Values it is given have the shard's dtype and shape, checked by the caller.
    """

    @property
    def shape(self) -> torch.Size:
        """``(rows, …)``, at least one dimension. Does not ask anybody."""

    @property
    def dtype(self) -> torch.dtype:
        """Does not ask anybody."""

    def read(self) -> torch.Tensor:
        """The whole shard as it is now; part of the autograd graph where it is a tensor of this process."""

    def read_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by local id: ``(n,)`` int64, all in range → ``(n, …)``. No row is a local answer: nobody is asked."""

    def edit(self, op: EditOp, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Change the whole shard, or rows of it by local id; see `apply_edit`, which says what each ``op`` does."""


class TensorShard:
    """A parameter or another tensor of this process."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    def read(self) -> torch.Tensor:
        return self._tensor

    def read_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self._tensor.index_select(0, rows.to(self._tensor.device))

    def edit(self, op: EditOp, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        apply_edit(self._tensor, op, value, rows)


@runtime_checkable
class RowStorage(Protocol):
    """What the storage of a `torchstrat.Variable` may offer besides whole values, where another process keeps it."""

    def read_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """As `ShardHandle.read_rows`."""

    def edit(self, op: EditOp, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """As `ShardHandle.edit`, exact whatever others change meanwhile."""


class VariableShard:
    """A `torchstrat.Variable`.

    Reads and edits go to its storage where that is a `RowStorage`. Otherwise additions go to the variable as such, and
    other edits read it and assign what they make of it.
    """

    def __init__(self, variable: Variable) -> None:
        self._variable = variable
        storage = storage_of(variable)
        self._storage = storage if isinstance(storage, RowStorage) else None

    @property
    def shape(self) -> torch.Size:
        return self._variable.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._variable.dtype

    def read(self) -> torch.Tensor:
        return self._variable.read_value()

    def read_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if self._storage is not None:
            return self._storage.read_rows(rows)
        value = self._variable.read_value()
        return value.index_select(0, rows.to(value.device))

    def edit(self, op: EditOp, value: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        if self._storage is not None:
            self._storage.edit(op, value, rows)
        elif op == "add":
            self._add(value, rows)
        elif op == "sub":
            self._add(-value, rows)
        elif rows is None and op == "assign":
            self._variable.assign(value)
        else:
            changed = self._variable.read_value()
            apply_edit(changed, op, value, rows)
            self._variable.assign(changed)

    def _add(self, value: torch.Tensor, rows: torch.Tensor | None) -> None:
        if rows is None:
            self._variable.assign_add(value)
        else:
            self._variable.scatter_add(
                torch.sparse_coo_tensor(rows[None], value, tuple(self.shape), check_invariants=False)
            )


def handle_of(shard: object) -> ShardHandle:
    """How to read and edit ``shard``, an entry of a `ShardedVariable`.

    Raises:
        WrongTypeError: it is no variable: neither a tensor, nor a `torchstrat.Variable`, nor a `ShardHandle`.
        InvalidArgumentError: it has no rows, being a scalar.
    """
    if isinstance(shard, torch.Tensor):
        if shard.grad_fn is not None or shard.layout is not torch.strided:
            raise WrongTypeError(
                f"a shard must be a variable; got a tensor of shape {tuple(shard.shape)} that is "
                f"{'computed from others' if shard.grad_fn is not None else f'of layout {shard.layout}'}. "
                "Make it a torch.nn.Parameter."
            )
        handle: ShardHandle = TensorShard(shard)
    elif isinstance(shard, Variable):
        handle = VariableShard(shard)
    elif isinstance(shard, ShardHandle):
        handle = shard
    else:
        raise WrongTypeError(
            f"a shard must be a variable, such as a torch.nn.Parameter; got {type(shard).__name__} {shard!r:.80}."
        )
    if not handle.shape:
        raise InvalidArgumentError("a shard must have rows; got a scalar variable. Give it a first dimension.")
    return handle


def spans_of(handles: Sequence[ShardHandle]) -> tuple[RowSpan, ...]:
    """The rows of the whole that each shard holds, at least one shard.

    Raises:
        InvalidArgumentError: the shards have different dtypes, or different sizes after the first dimension.
    """
    for number, handle in enumerate(handles):
        if handle.dtype != handles[0].dtype or handle.shape[1:] != handles[0].shape[1:]:
            raise InvalidArgumentError(
                f"the shards of one variable must have equal dtypes and rows; shard 0 has {handles[0].dtype} and "
                f"shape {tuple(handles[0].shape)}, shard {number} {handle.dtype} and {tuple(handle.shape)}."
            )
    stops = list(itertools.accumulate((handle.shape[0] for handle in handles), initial=0))
    return tuple(itertools.pairwise(stops))
