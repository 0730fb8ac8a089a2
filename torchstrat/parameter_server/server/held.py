"""A variable as one server holds it: its shards, their state, and the lock that both are behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from torchstrat.errors import InvalidArgumentError
from torchstrat.parameter_server.messages import ShardKey, StateOfShard, VariableSpec
from torchstrat.parameter_server.server.row_optimizer import RowState


@dataclass(eq=False)
class HeldVariable:
    """``lock`` guards everything below it. ``shards``: number of the shard → its rows, on the CPU.

    ``states``: (optimizer, shard) → state. ``row_states``: which entries of that go by rows, once rows were stepped.
    ``is_dropped``: the server was reset while somebody waited for the lock.
    """

    spec: VariableSpec
    lock: threading.Lock = field(default_factory=threading.Lock)
    shards: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[int, int], StateOfShard] = field(default_factory=dict)
    row_states: dict[tuple[int, int], dict[str, RowState]] = field(default_factory=dict)
    is_dropped: bool = False

    @property
    def total_bytes(self) -> int:
        """Of values and optimizer state."""
        tensors = [*self.shards.values(), *(v for state in self.states.values() for v in state.values())]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    def name_of(self, shard: int) -> str:
        return self.spec.name if len(self.spec.shards) == 1 else f"{self.spec.name}/part_{shard}"


class HeldShards:
    """The variables a call has locked, looked up by shard. ``owner``: the server, for error messages."""

    def __init__(self, variables: Mapping[int, HeldVariable], owner: str) -> None:
        self._variables = variables
        self.owner = owner

    def variable(self, key: ShardKey) -> HeldVariable:
        variable = self._variables.get(key[0])
        if variable is None:
            raise InvalidArgumentError(
                f"{self.owner} holds no variable number {key[0]}. It holds what the coordinator has created on it "
                "since it started; after a restart, restore a checkpoint."
            )
        if key[1] not in variable.shards:
            raise InvalidArgumentError(
                f"{self.owner} holds no shard {key[1]} of {variable.spec.name!r}; it holds {sorted(variable.shards)}."
            )
        return variable

    def tensor(self, key: ShardKey) -> torch.Tensor:
        return self.variable(key).shards[key[1]]

    def __iter__(self) -> Iterator[HeldVariable]:
        return iter(self._variables.values())

    def name(self, key: ShardKey) -> str:
        """For error messages: the variable and the part of it, and where it is."""
        return f"{self.variable(key).name_of(key[1])!r} on {self.owner}"


def check_rows(ids: torch.Tensor, rows: int, name: str, *, sorted_and_unique: bool) -> None:
    """Local row ids: ``(n,)`` int64 in [0, rows). ``name``: the shard, for the error."""
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
        found = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InvalidArgumentError(f"row ids of {name} must be an int64 tensor of one dimension; got {found}.")
    if ids.numel() == 0:
        return
    low, high = (int(ids[0]), int(ids[-1])) if sorted_and_unique else (int(ids.min()), int(ids.max()))
    if sorted_and_unique and not bool((ids[1:] > ids[:-1]).all()):
        raise InvalidArgumentError(f"row ids of {name} must be sorted and unique, so that each row is stepped once.")
    if low < 0 or high >= rows:
        raise InvalidArgumentError(
            f"row ids of {name} must be in [0, {rows}); got ids from {low} to {high}. Ids are local to the shard."
        )
