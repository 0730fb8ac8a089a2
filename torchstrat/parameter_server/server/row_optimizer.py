"""Any optimizer on a few rows of a table: rows that a step does not touch stay as they are, in every respect.

The rows and the rows of their state are gathered, the optimizer steps on them as if they were a whole parameter, and
the result is copied back: the cost follows the number of rows, not the size of the table. Weight decay, momentum and
running averages of the other rows wait until they are touched, which is SparseAdam's rule. State that does not go by
rows (``step``, NAdam's product of momenta) is one per shard and advances at every step, also at one without any row.

The first step of a shard lets the optimizer itself make the state of the rows it touches. What the other rows' state
is, before their first touch, is found out on small stand-ins of the table; see `learn_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchstrat.errors import UnsupportedError
from torchstrat.parameter_server.messages import StateOfShard
from torchstrat.parameter_server.server.packing import Options
from torchstrat.parameter_server.server.shard_optimizer import ShardOptimizer, sparse_rows
from torchstrat.parameter_server.variables.edits import put_rows


@dataclass(frozen=True)
class RowState:
    """An entry of an optimizer's state with one row per row of the table.

    ``fill``: what every element of an untouched row is; None where it is a copy of the row of the table itself.
    ``shape`` is a row's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float | complex | None

    def bytes_for(self, rows: int) -> int:
        return rows * torch.Size(self.shape).numel() * self.dtype.itemsize

    def allocate(self, table: torch.Tensor) -> torch.Tensor:
        if self.fill is None:
            return table.detach().clone()
        shape = (table.shape[0], *self.shape)
        if self.fill == 0:
            return torch.zeros(shape, dtype=self.dtype)  # pages that no row has touched take no memory
        return torch.full(shape, self.fill, dtype=self.dtype)


def gather_state(state: StateOfShard, ids: torch.Tensor, row_state: Mapping[str, RowState]) -> StateOfShard:
    """The state of these rows: what goes by rows is copied out, the rest is the shard's own."""
    return {
        name: value.index_select(0, ids) if name in row_state and isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def scatter_state(
    state: StateOfShard,
    of_rows: StateOfShard,
    ids: torch.Tensor,
    table: torch.Tensor,
    row_state: Mapping[str, RowState],
) -> None:
    """Put the state of these rows back, in place. ``table``: the whole shard, before this step where it matters."""
    for name, value in of_rows.items():
        entry = row_state.get(name)
        if entry is None or not isinstance(value, torch.Tensor):
            state[name] = value
            continue
        if not isinstance(state.get(name), torch.Tensor):
            state[name] = entry.allocate(table)
        put_rows(state[name], ids, value)
    for name in [name for name in state if name not in of_rows]:
        del state[name]


def learn_state(optimizer: ShardOptimizer, options: Options, group: int, like: torch.Tensor) -> dict[str, RowState]:
    """Which entries of the state go by rows, and what they are for a row that was never touched.

    Three steps on stand-ins of a table like ``like``: of three rows of zeros without gradient, and twice of five random
    rows with different gradients; what is in the state the moment an entry is first written is kept.

    - An entry that has three rows for the first and five for the others goes by rows.
    - If both gradients give the same, it was made before any arithmetic (``zeros_like``, ``full_like``, a copy of the
      parameter), and that is its initial value.
    - Otherwise it came out of the arithmetic (SGD's first momentum is the gradient): then zeros and no gradient tell.

    Raises `UnsupportedError` where neither gives one number, or a copy of the parameter.
    """
    generator = torch.Generator().manual_seed(0)
    shape = like.shape[1:]
    random, first, second = (
        torch.rand((5, *shape), generator=generator, dtype=torch.float64).add_(0.5).to(like.dtype) for _ in range(3)
    )
    still = like.new_zeros((3, *shape))
    zeros = _first_values(optimizer, options, group, still, still)
    one = _first_values(optimizer, options, group, random, first)
    other = _first_values(optimizer, options, group, random, second)
    learned = {}
    for name, value in one.items():
        quiet = zeros.get(name)
        if not (isinstance(value, torch.Tensor) and isinstance(quiet, torch.Tensor) and value.dim()):
            continue
        if value.shape[0] != 5 or quiet.shape[0] != 3 or value.shape[1:] != quiet.shape[1:]:
            continue
        if value.shape == random.shape and torch.equal(value, random) and torch.equal(other[name], random):
            fill = None
        else:
            fill = _the_one_value(value if torch.equal(value, other[name]) else quiet, optimizer, name)
        learned[name] = RowState(tuple(value.shape[1:]), value.dtype, fill)
    return learned


def _the_one_value(tensor: torch.Tensor, optimizer: ShardOptimizer, name: str) -> float | complex:
    if tensor.numel() == 0:
        return 0.0
    value = tensor.flatten()[0]
    if not bool((tensor == value).all()):
        raise UnsupportedError(
            f"{optimizer.name} starts state[{name!r}] with values that are neither one number nor a copy of the "
            "parameter, so what it would be for rows that no step has touched cannot be told. Use rows_only=False for "
            "this optimizer, which applies its dense rule."
        )
    number: float | complex = value.item()
    return number


def _first_values(
    optimizer: ShardOptimizer, options: Options, group: int, values: torch.Tensor, gradient: torch.Tensor
) -> StateOfShard:
    """The entries of the state as they were when a step on a fresh parameter first wrote them."""
    parameter = torch.nn.Parameter(values.clone())
    parameter.grad = gradient.clone()
    if optimizer.needs_sparse:
        parameter.grad = sparse_rows(torch.arange(len(gradient)), gradient.clone(), len(gradient))
    state = _Remembering(optimizer.initial_state(options, parameter))
    groups: list[list[torch.Tensor]] = [[] for _ in optimizer.options]
    groups[group] = [parameter]
    every = [options if number == group else own for number, own in enumerate(optimizer.options)]
    after = optimizer.step(every, groups, {parameter: state})
    return {**after.get(parameter, {}), **state.first}


class _Remembering(dict[str, Any]):
    """A state that keeps a copy of what each entry was first set to, before the step goes on to change it in place."""

    def __init__(self, initial: Mapping[str, Any]) -> None:
        super().__init__(initial)
        self.first: StateOfShard = {}
        for name, value in initial.items():
            self._remember(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        self._remember(name, value)
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def _remember(self, name: str, value: Any) -> None:
        if name not in self.first:
            self.first[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
