"""`ShardedVariable`: several variables that are the rows of one.

It takes part in computations as the tensor that it can be converted to, and is otherwise no tensor.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from torchstrat.core._torch_private import sparse_indices, sparse_values
from torchstrat.core.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.core.variable.storage import initial_tensor, parse_shape, to_tensor
from torchstrat.core.variable.tensor_like import TensorInShards, array_of
from torchstrat.core.variable.variable import Variable
from torchstrat.parameter_server.messages import EditOp
from torchstrat.parameter_server.partitioners import row_offsets, shards_of
from torchstrat.parameter_server.variables.placement import Partitioner
from torchstrat.parameter_server.variables.sharded_indexing import (
    RowSpan,
    ShardHandle,
    ShardIndexError,
    as_ids,
    check_ids,
    handle_of,
    parse_key,
    spans_of,
    split_ids,
    split_range,
)

_INSTEAD = {
    "device": "its shards may be on several; ask each of .variables",
    "trainable": "ask the requires_grad of each of .variables",
    "value": "torch.as_tensor(v) is the whole value",
    "read_value": "torch.as_tensor(v) is the whole value",
}


class _NoSuchAttributeError(WrongTypeError, AttributeError):
    """What tensors and variables have, and a `ShardedVariable` has not."""


class ShardedVariable(TensorInShards, torch.nn.Module):
    """One variable in shards: they hold its rows, that is, the entries of the first dimension, in order.

    Reads like a tensor: arithmetic, torch functions and ``torch.as_tensor`` put the shards together, and an index reads
    the rows it names. Everything that trains works on `variables`: gradients arrive at the shards, optimizers step
    them. `embedding_lookup` reads rows by number. It has no length, device or ``requires_grad`` of its own; iterating
    gives the shards.

    It is a `torch.nn.Module`, so that a module it is an attribute of has the shards among its parameters, as
    ``NAME.part_0``, ``NAME.part_1``, ….

    Args:
        variables: a list, one entry per shard, of equal dtype and equal sizes in all dimensions but the first: a
            `torch.nn.Parameter`; a `torch.nn.Buffer`; a `Variable`; or an object with the members of
            `torchstrat.parameter_server.variables.sharded_indexing.ShardHandle`, wherever it keeps the shard.
        name: for messages.

    Raises:
        WrongTypeError: no list, an empty one, or entries that are no variables, such as plain tensors.
        InvalidArgumentError: dtypes or sizes do not agree, or a shard is a scalar.
    """

    name: str

    def __init__(self, variables: list[Any], name: str = "ShardedVariable") -> None:
        super().__init__()
        if not isinstance(variables, list | tuple) or not variables:
            raise WrongTypeError(
                "ShardedVariable needs a list of at least one variable; got "
                + ("an empty one." if isinstance(variables, list | tuple) else f"{type(variables).__name__}.")
            )
        for shard in variables:
            _check_is_variable(shard)
        handles = [handle_of(shard) for shard in variables]
        self.name = name
        self._spans = spans_of(handles)
        self._shape = torch.Size((self._spans[-1][1], *handles[0].shape[1:]))
        for number, shard in enumerate(variables):
            if isinstance(shard, torch.Tensor) and not isinstance(shard, torch.nn.Parameter):
                self.register_buffer(f"part_{number}", shard, persistent=getattr(shard, "persistent", True))
            else:
                setattr(self, f"part_{number}", shard)

    @property
    def variables(self) -> list[Any]:
        """The shards, in the order of their rows."""
        return [getattr(self, f"part_{number}") for number in range(len(self._spans))]

    @property
    def shape(self) -> torch.Size:
        """Of the whole variable."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Of all shards."""
        return self._handles()[0].dtype

    @property
    def row_spans(self) -> tuple[RowSpan, ...]:
        """The rows ``(start, stop)`` of each shard, in order."""
        return self._spans

    def _handles(self) -> list[ShardHandle]:
        return [handle_of(shard) for shard in self.variables]

    # -- reading ----------------------------------------------------------------------------------------------------

    def _lend(self) -> torch.Tensor:
        return _joined([handle.read() for handle in self._handles()])

    def numpy(self) -> np.ndarray[Any, Any]:
        """The whole value as a new NumPy array; float32 for bfloat16, which NumPy has not."""
        return array_of(self._lend())

    def __getitem__(self, key: object) -> torch.Tensor:
        """What the whole tensor gives for ``key``, as a tensor of its own; reads only the rows that ``key`` names.

        Integers, slices with positive steps, boolean masks, ``...``, None, and tuples of them.

        Raises:
            ShardIndexError: out of range, or too many dimensions (an IndexError, and a ValueError).
            WrongTypeError: another kind of index, such as a tensor or a list of row numbers.
            InvalidArgumentError: a step that is not positive; a single bool.
        """
        selection = parse_key(key, self._shape[0])
        if isinstance(selection.rows, torch.Tensor):
            return self._rows_in_order(selection.rows)
        rows = self._range_of_rows(selection.rows)
        if not selection.key:
            return rows
        try:
            return rows[selection.key]
        except IndexError as error:
            raise ShardIndexError(f"ShardedVariable of shape {tuple(self._shape)}: {error}") from None

    def _range_of_rows(self, rows: range) -> torch.Tensor:
        if rows == range(self._shape[0]):
            return self._lend()
        handles = self._handles()
        parts = [handles[shard].read_rows(torch.tensor(mine)) for shard, mine in split_range(rows, self._spans)]
        return _joined(parts or [handles[0].read_rows(torch.zeros(0, dtype=torch.int64))])

    def _rows_in_order(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by ascending ids, ``(n,)`` int64 in range."""
        parts = zip(self._handles(), split_ids(ids, self._spans), strict=True)
        return _joined([handle.read_rows(local) for handle, (_, local) in parts])

    def sparse_read(self, indices: object) -> torch.Tensor:
        """Rows by number, ``(n,)`` → ``(n, …)``, grouped by shard, and in the given order within a shard.

        `embedding_lookup` gives them in the given order.

        Raises:
            InvalidArgumentError: ``indices`` are not one-dimensional or out of range.
            WrongTypeError: they are no int32 or int64 tensor.
            UnsupportedError: the rows are not divided evenly; see `scatter_add`.
        """
        return self._rows_in_order(self._checked_rows(as_ids(indices), "sparse_read"))

    # -- assigning --------------------------------------------------------------------------------------------------

    def assign(self, value: object) -> ShardedVariable:
        """Replace the value; ``value`` has exactly this variable's shape. Returns the variable, as all edits do.

        Raises:
            InvalidArgumentError: another shape or dtype; nothing was changed then.
        """
        return self._edit_whole("assign", value, "assign")

    def assign_add(self, delta: object) -> ShardedVariable:
        """Add ``delta``, which has exactly this variable's shape."""
        return self._edit_whole("add", delta, "assign_add")

    def assign_sub(self, delta: object) -> ShardedVariable:
        """Subtract ``delta``, which has exactly this variable's shape."""
        return self._edit_whole("sub", delta, "assign_sub")

    def _edit_whole(self, op: EditOp, value: object, call: str) -> ShardedVariable:
        tensor = to_tensor(value, self.dtype, call)
        if tensor.shape != self._shape:
            raise InvalidArgumentError(
                f"{call} got shape {tuple(tensor.shape)} for a ShardedVariable of shape {tuple(self._shape)}; they "
                "must be equal. Expand the value with .expand(…) first, or edit single shards through .variables."
            )
        for handle, (start, stop) in zip(self._handles(), self._spans, strict=True):
            handle.edit(op, tensor[start:stop])
        return self

    # -- assigning rows ---------------------------------------------------------------------------------------------

    def scatter_add(self, sparse_delta: torch.Tensor) -> ShardedVariable:
        """Add to single rows. Repeated rows accumulate, here and in the methods below.

        Args:
            sparse_delta: a sparse COO tensor with one sparse dimension, which need not be coalesced: row numbers
                ``(1, n)`` and rows ``(n, …)`` of this variable's dtype. Its own first size does not matter.

        Raises:
            WrongTypeError: it is no sparse COO tensor.
            InvalidArgumentError: several sparse dimensions; another dtype or other rows; row numbers out of range.
            UnsupportedError: the rows of this variable are not divided evenly over its shards, as partitioners divide
                them (sizes differ by at most one, the first shards are the larger).
        """
        return self._edit_rows("add", sparse_delta, "scatter_add")

    def scatter_sub(self, sparse_delta: torch.Tensor) -> ShardedVariable:
        """Subtract from single rows."""
        return self._edit_rows("sub", sparse_delta, "scatter_sub")

    def scatter_mul(self, sparse_delta: torch.Tensor) -> ShardedVariable:
        """Multiply single rows."""
        return self._edit_rows("mul", sparse_delta, "scatter_mul")

    def scatter_div(self, sparse_delta: torch.Tensor) -> ShardedVariable:
        """Divide single rows; integers are divided towards zero."""
        return self._edit_rows("div", sparse_delta, "scatter_div")

    def scatter_min(self, sparse_delta: torch.Tensor) -> ShardedVariable:
        """Lower single rows to at most the given values."""
        return self._edit_rows("min", sparse_delta, "scatter_min")

    def scatter_max(self, sparse_delta: torch.Tensor) -> ShardedVariable:
        """Raise single rows to at least the given values."""
        return self._edit_rows("max", sparse_delta, "scatter_max")

    def scatter_update(self, sparse_delta: torch.Tensor) -> ShardedVariable:
        """Replace single rows; of repeated ones the last counts."""
        return self._edit_rows("assign", sparse_delta, "scatter_update")

    def batch_scatter_update(self, sparse_delta: torch.Tensor) -> ShardedVariable:
        """The same as `scatter_update`: row numbers are one-dimensional, so there is no batch to go through."""
        return self._edit_rows("assign", sparse_delta, "batch_scatter_update")

    def _edit_rows(self, op: EditOp, sparse: torch.Tensor, call: str) -> ShardedVariable:
        if not isinstance(sparse, torch.Tensor) or sparse.layout is not torch.sparse_coo:
            shown = f"layout {sparse.layout}" if isinstance(sparse, torch.Tensor) else type(sparse).__name__
            raise WrongTypeError(
                f"{call} needs a sparse COO tensor; got {shown}. Build one with torch.sparse_coo_tensor(row_numbers"
                f"[None], rows, {tuple(self._shape)})."
            )
        if sparse.shape[1:] != self._shape[1:] or sparse.dtype != self.dtype:
            raise InvalidArgumentError(
                f"{call} got rows of shape {tuple(sparse.shape[1:])} and {sparse.dtype} for a ShardedVariable with "
                f"rows of shape {tuple(self._shape[1:])} and {self.dtype}."
            )
        if not len(sparse_values(sparse)):  # torch.sparse_coo_tensor(size=…) has all dimensions sparse
            return self
        if sparse.sparse_dim() != 1:
            raise InvalidArgumentError(
                f"{call} needs one sparse dimension, row numbers of shape (1, n); got {sparse.sparse_dim()} sparse "
                "dimensions. Rows are changed whole."
            )
        # Coalescing would add up the values of repeated rows, which is right for additions only.
        ids, rows = self._checked_rows(sparse_indices(sparse)[0], call), sparse_values(sparse)
        if op == "div" and not (self.dtype.is_floating_point or self.dtype.is_complex) and not bool(rows.all()):
            raise InvalidArgumentError(f"{call} got zeros to divide {self.dtype} by; nothing was changed.")
        for handle, (places, local) in zip(self._handles(), split_ids(ids, self._spans), strict=True):
            if len(places):
                handle.edit(op, rows.index_select(0, places.to(rows.device)), local)
        return self

    def _checked_rows(self, ids: torch.Tensor, call: str) -> torch.Tensor:
        if ids.dtype not in (torch.int32, torch.int64):
            raise WrongTypeError(f"{call} needs row numbers of int32 or int64; got {ids.dtype}.")
        if ids.dim() != 1:
            raise InvalidArgumentError(f"{call} needs row numbers of shape (n,); got shape {tuple(ids.shape)}.")
        sizes = [stop - start for start, stop in self._spans]
        if sizes != sorted(sizes, reverse=True) or sizes[0] - sizes[-1] > 1:
            raise UnsupportedError(
                f"{call} needs shards that divide the rows evenly, the first of them the larger; this ShardedVariable "
                f"has shards of {sizes} rows. Edit them through .variables, or cut it as partitioners do."
            )
        check_ids(ids, self._shape[0], call)
        return ids

    # -- what it is, and is not -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return iter(self.variables)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            _no_such_attribute(name)

    def __repr__(self) -> str:
        rows = ", ".join(str(stop - start) for start, stop in self._spans)
        return f"<ShardedVariable {self.name!r} shape={tuple(self._shape)}, dtype={self.dtype}, shards of {rows} rows>"


def _no_such_attribute(name: str) -> NoReturn:
    hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise _NoSuchAttributeError(f"a ShardedVariable has no attribute {name!r}{hint}.")


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts as one tensor of its own, where the first one is."""
    return torch.cat([part.to(parts[0].device) for part in parts])


def _check_is_variable(shard: Any) -> None:
    """A plain tensor is a value like any other: whoever hands it in will not expect it to change."""
    plain = isinstance(shard, torch.Tensor) and not isinstance(shard, torch.nn.Parameter | torch.nn.Buffer)
    if plain and not shard.requires_grad:
        raise WrongTypeError(
            f"a shard must be a variable; got a plain tensor of shape {tuple(shard.shape)}. Wrap it in "
            "torch.nn.Parameter, or in torch.nn.Buffer if it is not trained."
        )


class ShardInfo(NamedTuple):
    """What one call of an initial value's function is to make: ``shape`` at ``offset`` of the whole, per dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


def create_variable(
    partitioner: Partitioner,
    initial_value: Any,
    name: str | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    make: Callable[[torch.Tensor, str | None], Variable],
) -> Variable | ShardedVariable:
    """A `Variable`, or a `ShardedVariable` whose shards are ``NAME/part_0``, ``NAME/part_1``, …

    An initial value is cut. A function is called once, or, where ``shape`` and ``dtype`` are given, once per shard:
    with ``partition_shape`` and ``partition_offset``, or a `ShardInfo` as ``shard_info``, if it takes these, so that no
    process needs the whole value.

    Args:
        make: creates one variable that is not split.
    """
    label = name or "Variable"
    whole: torch.Tensor | None = None
    if callable(initial_value) and shape is not None and None not in shape and dtype is not None:
        whole_shape, whole_dtype = tuple(int(size) for size in shape), dtype
    else:
        whole = initial_tensor(initial_value, dtype, label)
        parse_shape(shape, whole)
        whole_shape, whole_dtype = tuple(whole.shape), whole.dtype
    count = shards_of(partitioner, whole_shape, whole_dtype) if whole_shape else 1
    if count == 1:
        if whole is None:
            whole = initial_tensor(initial_value, dtype, label)
            parse_shape(whole_shape, whole)
        return make(whole, name)
    parts = []
    for number, (start, stop) in enumerate(row_offsets(whole_shape[0], count)):
        value = _of_shard(initial_value, whole_shape, dtype, start, stop, label) if whole is None else whole[start:stop]
        parts.append(make(value, None if name is None else f"{name}/part_{number}"))
    return ShardedVariable(parts)


def _of_shard(
    initial_value: Callable[..., object],
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    start: int,
    stop: int,
    label: str,
) -> torch.Tensor:
    """A function's value for rows ``start`` to ``stop``, cut where the function gives the whole value."""
    info = ShardInfo((stop - start, *shape[1:]), (start, *[0] * (len(shape) - 1)))
    part = {"partition_shape": info.shape, "partition_offset": info.offset}
    value = None
    parameters = _parameters_of(initial_value)
    if "shard_info" in parameters:
        value = initial_tensor(lambda: initial_value(shard_info=info), dtype, label)
    elif parameters.keys() >= part.keys():
        value = initial_tensor(lambda: initial_value(**part), dtype, label)
    elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        # A function that hands its keywords on to one that does not take these says so by an error.
        with contextlib.suppress(TypeError, ValueError):
            value = initial_tensor(lambda: initial_value(**part), dtype, label)
    if value is None:
        value = initial_tensor(initial_value, dtype, label)
    elif value.shape == info.shape:
        return value
    parse_shape(shape, value)
    return value[start:stop]


def _parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
