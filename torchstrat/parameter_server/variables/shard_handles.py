"""What a `ShardedVariable` needs of one of its shards, wherever that shard lives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from torchstrat.errors import InvalidArgumentError, WrongTypeError
from torchstrat.parameter_server.messages import EditOp
from torchstrat.parameter_server.variables.shard_edits import apply_edit
from torchstrat.parameter_server.variables.sharded_slicing import RowSpan
from torchstrat.variable.variable import Variable


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
        [storage, *others] = variable._cells
        self._storage = storage if isinstance(storage, RowStorage) and not others else None

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


def handle_of(shard: Any) -> ShardHandle:
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
