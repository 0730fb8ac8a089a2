"""A parameter server's store with small variables in it, and what is pushed to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchstrat.core.optimizers import Kind
from torchstrat.parameter_server.messages import (
    COORDINATOR,
    AppliedPushes,
    NewOptimizer,
    NewShard,
    OptimizerStep,
    Push,
    Shard,
    ShardEdit,
    ShardKey,
    StateOfShard,
    VariableSpec,
)
from torchstrat.parameter_server.server.shard_optimizer import pack_optimizer
from torchstrat.parameter_server.server.store import VariableStore


def make_spec(number: int, value: torch.Tensor, shards: int = 1, name: str | None = None) -> VariableSpec:
    rows = value.shape[0] if value.dim() else 1
    cuts = [round(rows * part / shards) for part in range(shards + 1)]
    own = tuple(Shard(0, start, stop) for start, stop in itertools.pairwise(cuts))
    return VariableSpec(number, name or f"v{number}", tuple(value.shape), value.dtype, "parameter", own)


def new_shards(spec: VariableSpec, value: torch.Tensor) -> list[NewShard]:
    return [
        NewShard(spec, number, value[shard.start : shard.stop] if value.dim() else value)
        for number, shard in enumerate(spec.shards)
    ]


def make_store(*values: torch.Tensor, shards: int = 1) -> VariableStore:
    """Variables 0, 1, … with these values."""
    store = VariableStore("ps 0")
    for number, value in enumerate(values):
        store.create(new_shards(make_spec(number, value, shards), value))
    return store


def whole(store: VariableStore, number: int = 0, shards: int = 1) -> torch.Tensor:
    parts = store.read([(number, shard) for shard in range(shards)])
    return parts[0] if shards == 1 else torch.cat(parts)


class Held(NamedTuple):
    """What a store holds. ``states``: optimizer → shard → state, of the shards that have any."""

    values: dict[ShardKey, torch.Tensor]
    states: dict[int, dict[ShardKey, StateOfShard]]
    applied: AppliedPushes


def held_by(store: VariableStore) -> Held:
    """Copies of all of it. A cut that goes on is given up."""
    cut, known = store.begin_cut("held_by"), store.catalog()
    store.end_cut("held_by")
    keys = [(number, shard) for number, variable in cut.variables.items() for shard in variable.values]
    states = {one["number"]: store.optimizer_state(one["number"]) for one in known["optimizers"]}
    return Held(dict(zip(keys, store.read(keys), strict=True)), states, cut.applied)


def options_of(optimizer: Optimizer) -> tuple[dict[str, Any], ...]:
    return tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)


def add_optimizer(
    store: VariableStore,
    optimizer: Optimizer,
    groups: Sequence[Sequence[int]],
    kind: Kind | None = None,
    **settings: Any,
) -> None:
    packed = pack_optimizer(optimizer, kind)
    store.add_optimizer(NewOptimizer(0, packed, tuple(tuple(group) for group in groups), **settings))


def push_of(*, function: int = COORDINATOR, index: int = 0, incarnation: str = "w0", **parts: Any) -> Push:
    return Push(function, index, incarnation, **parts)


def dense_step(optimizer: Optimizer, **gradients: Any) -> OptimizerStep:
    """``dense_step(opt, v0=…, v1=…)``: gradients of whole variables, each of one shard."""
    dense = tuple(((int(name[1:]), 0), gradient) for name, gradient in gradients.items())
    return OptimizerStep(0, options_of(optimizer), dense=dense)


def row_step(optimizer: Optimizer, ids: torch.Tensor, gradient: torch.Tensor) -> OptimizerStep:
    """Of rows of variable 0, which has one shard."""
    return OptimizerStep(0, options_of(optimizer), rows=(((0, 0), ids, gradient),))


def add_edit(
    number: int, value: float | torch.Tensor, like: torch.Tensor, rows: torch.Tensor | None = None
) -> ShardEdit:
    tensor = value if isinstance(value, torch.Tensor) else torch.full_like(like, value)
    return ShardEdit((number, 0), "add", tensor, rows)
