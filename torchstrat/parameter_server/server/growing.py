"""More rows for the last shard of a table: the rows that are there stay, in other memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from torchstrat.checkpoint.pieces import goes_by_rows
from torchstrat.errors import UnsupportedError
from torchstrat.host_memory import check_fits
from torchstrat.parameter_server.messages import NewRows, ShardKey, StateOfShard
from torchstrat.parameter_server.server.advice import MORE_SERVERS
from torchstrat.parameter_server.server.held import HeldShards, HeldVariable
from torchstrat.parameter_server.server.steps import HeldOptimizer
from torchstrat.parameter_server.variables.deferred_init import replay


def add_rows(
    new: NewRows,
    key: ShardKey,
    variable: HeldVariable,
    shards: HeldShards,
    optimizer_of: Callable[[int], HeldOptimizer],
) -> None:
    """Behind the rows of shard ``key``, and to what optimizers keep of each row. Changes all of it or, where it raises,
    nothing."""
    table, spec = shards.tensor(key), new.spec
    first, count = variable.spec.shape[0], spec.shape[0] - variable.spec.shape[0]
    by_rows = {
        slot: [name for name, value in state.items() if _goes_by_rows(value, table)]
        for slot, state in variable.states.items()
        if slot[1] == key[1]
    }
    held = [table, *(variable.states[slot][name] for slot, names in by_rows.items() for name in names)]
    needed = sum(one.nbytes // max(len(one), 1) * (len(one) + count) for one in held)
    check_fits(needed, f"{count:,} more rows of {shards.name(key)}, and those that it has, in one piece", MORE_SERVERS)
    added = new.value
    if added is None:
        added = replay(new.recipe, (count, *spec.shape[1:]), spec.dtype, new.seed, first, spec.shape[0], spec.name)
    states = {
        slot: dict(_with_rows(variable.states[slot], names, key, added, shards, optimizer_of(slot[0])))
        for slot, names in by_rows.items()
    }
    shards.replace(key, torch.cat([table, added]), states)
    ids, gradient = shards.gradients.get(key, (None, None))
    if ids is None and gradient is not None:  # left under no_sync, of the whole table
        shards.put_gradient(key, (None, torch.cat([gradient, torch.zeros_like(added)])))


def _goes_by_rows(value: object, table: torch.Tensor) -> bool:
    return goes_by_rows(value, table.shape[0], tuple(table.shape))


def _with_rows(
    state: StateOfShard,
    names: list[str],
    key: ShardKey,
    added: torch.Tensor,
    shards: HeldShards,
    optimizer: HeldOptimizer,
) -> Iterator[tuple[str, torch.Tensor]]:
    learned = dict(shards.row_state(key, optimizer.number) or {})
    if not learned.keys() >= set(names):
        group = next(number for number, variables in enumerate(optimizer.groups) if key[0] in variables)
        learned = {**optimizer.untouched_state(group, shards.tensor(key)), **learned}
    for name in names:
        if name not in learned:
            raise UnsupportedError(
                f"{shards.name(key)} gets no more rows: what state[{name!r}] of {optimizer.name} is for a row that no "
                "step has touched cannot be told. Make the larger table in a new program, and restore a checkpoint."
            )
        yield name, torch.cat([state[name], learned[name].allocate(added)])
