"""Assigning to a `Variable`: once for all replicas from a replica's code, as it is from everywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from torchstrat.core import context
from torchstrat.core.communicator import Communicator, within
from torchstrat.core.devices import torch_device
from torchstrat.core.errors import InvalidArgumentError, ReplicaDivergenceError, WrongTypeError
from torchstrat.core.reduction import VariableAggregation
from torchstrat.core.values import PerReplica, select_replica
from torchstrat.core.variable.storage import (
    Edit,
    Given,
    Storage,
    VariablePlacement,
    check_edit,
    exchange_values,
    from_first_replica,
    merge_values,
    spans_processes,
    to_tensor,
)

if TYPE_CHECKING:
    from torchstrat.core.variable.variable import Variable

_updated_replica: ContextVar[int | None] = ContextVar("_updated_replica", default=None)


@contextmanager
def updating(replica: int) -> Iterator[None]:
    """For `StrategyExtended.update`: in this block, mirrored variables mean their component of one replica."""
    token = _updated_replica.set(replica)
    try:
        yield
    finally:
        _updated_replica.reset(token)


def updated_replica() -> int | None:
    return _updated_replica.get()


def apply(variable: Variable, edit: Edit, value: Any) -> Variable:
    """Make one assignment; what the method that the user called returns."""
    if variable._kind is VariablePlacement.ONE:
        if isinstance(value, PerReplica):
            raise WrongTypeError(
                f"{edit.value} got a PerReplica value for a variable with one component; open it with "
                "strategy.local_results, or combine it with strategy.reduce, first."
            )
        _write(variable, variable._cells, edit, to_tensor(value, variable.dtype, edit.value))
        return variable
    replica = context.replica_of(variable._strategy, edit.value)
    if replica is None:
        return _across(variable, edit, value)
    return _in_replica(variable, edit, select_replica(replica, value), replica)


def _write(variable: Variable, cells: Sequence[Storage], edit: Edit, value: torch.Tensor) -> None:
    for cell in cells:
        check_edit(edit, value, cell.shape, variable._declared)
    for cell in cells:
        cell.write(edit, value)


# -- in cross-replica context ---------------------------------------------------------------------------------------


def _across(variable: Variable, edit: Edit, value: Any) -> Variable:
    """As it is: a `PerReplica` value gives each component its own, and a single one the first replica's."""
    strategy, only = variable._strategy, updated_replica()
    if not variable._components:
        if isinstance(value, PerReplica):
            with within(f"{edit.value} of Variable {variable.name!r}"):
                value = from_first_replica(strategy, to_tensor(value.values[0], variable.dtype, edit.value))
        _write(variable, variable._cells, edit, to_tensor(value, variable.dtype, edit.value))
        return variable
    if only is None and variable._is_on_read and variable.aggregation is VariableAggregation.SUM:
        value = _share_of_sum(variable, edit, value)
    for replica, component in zip(variable._replicas, variable._components, strict=True):
        if only in (None, replica):
            apply(component, edit, select_replica(replica, value))
    return variable


def _share_of_sum(variable: Variable, edit: Edit, value: Any) -> Any:
    """What each component has to hold so that their sum is ``value``."""
    if edit is not Edit.ASSIGN:
        raise InvalidArgumentError(
            f"{edit.value} outside of run on the ON_READ variable {variable.name!r} with aggregation SUM: its "
            "components add up, and it is not clear which is to change. Use assign, or do it in a replica."
        )
    if isinstance(value, PerReplica):
        return value
    share = to_tensor(value, variable.dtype, edit.value) / variable._strategy.num_replicas_in_sync
    return share.to(variable.dtype)


# -- in a replica's code --------------------------------------------------------------------------------------------


def _in_replica(variable: Variable, edit: Edit, value: Any, replica: int) -> Variable:
    if variable._components and (variable._is_on_read or variable.aggregation is VariableAggregation.NONE):
        return apply(variable._components[variable._replicas.index(replica)], edit, value)
    if variable.aggregation is VariableAggregation.NONE:
        raise InvalidArgumentError(
            f"{edit.value} in a replica on Variable {variable.name!r}, which has aggregation NONE: "
            f"{variable._strategy.num_replicas_in_sync} replicas would each assign to the one copy. Create it with "
            "aggregation=ts.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or assign outside of run."
        )
    engine = variable._strategy._engine
    if not spans_processes(variable._strategy):
        merged: Variable = engine.merge_call(_merge, (variable, edit, Given(value)), {})
        return merged
    where = torch_device(engine.device_of_replica(replica))
    with within(f"{edit.value} of Variable {variable.name!r}"):
        total = exchange_values(engine, variable.aggregation, edit, value, variable.dtype, where)
    _write(variable, variable._cells, edit, total)
    return variable._components[0] if variable._components else variable


def _merge(strategy: Any, variable: Any, edit: Any, given: Any) -> Any:
    """All replicas of this process assign to one variable: combine their values, write once."""
    if isinstance(variable, PerReplica) or isinstance(edit, PerReplica):
        raise ReplicaDivergenceError(
            "the replicas assigned to different variables, or in different ways, in one place of the step: "
            f"{variable!r:.200}, {edit!r:.200}. Every replica has to make the same assignments in the same order."
        )
    values = [one.value for one in given.values] if isinstance(given, PerReplica) else [given.value]
    total = merge_values(variable.aggregation, edit, values, variable.dtype)
    _write(variable, variable._cells, edit, total)
    if not variable._components:
        return variable
    return PerReplica(variable._components, replica_ids=variable._replicas)


# -- replicas that sat a run out ------------------------------------------------------------------------------------


def hand_over(communicator: Communicator, variables: Mapping[int, Variable], source: int) -> None:
    """After a run in which some processes had nothing to do: rank ``source``'s values for all variables that are to be
    equal everywhere. ``variables`` have the same number on all processes; one may have dropped some already."""
    shared = {
        number: variable._cells[0]
        for number, variable in variables.items()
        if not variable._is_on_read and variable.aggregation is not VariableAggregation.NONE
    }
    values = {number: cell.copy() for number, cell in shared.items()} if communicator.rank == source else None
    call = "the end of a run (handing its variables to replicas without rows)"
    for number, value in communicator.broadcast_object(values, source, call).items():
        if communicator.rank != source and number in shared:
            shared[number].write(Edit.ASSIGN, value)
