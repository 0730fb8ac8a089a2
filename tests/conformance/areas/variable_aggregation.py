"""`ts.Variable`: what becomes of the values that several replicas assign to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.areas.run import replica_id
from tests.conformance.harness import Case, Difference, make_strategy, sparse_rows


def made(case: Case, strategy: ts.Strategy, initial: Any = 1.0, **arguments: Any) -> ts.Variable:
    aggregation = ts.VariableAggregation[case.setup.get("aggregation", "NONE")]
    with strategy.scope():
        return ts.Variable(initial, **{"aggregation": aggregation} | arguments)


def in_run(name: str) -> Callable[[Case], torch.Tensor]:
    """The variable after every replica called one of its methods with ``r + 1``."""

    def operation(case: Case) -> torch.Tensor:
        strategy, dtype = make_strategy(case.setup), getattr(torch, case.setup["dtype"])
        variable = made(case, strategy, case.setup["initial"], dtype=dtype)
        strategy.run(lambda: getattr(variable, name)(torch.tensor(replica_id() + 1, dtype=dtype)))
        return variable.read_value()

    return operation


def python_value(initial: Any, value: Any) -> Callable[[Case], torch.Tensor]:
    def operation(case: Case) -> torch.Tensor:
        strategy = make_strategy(case.setup)
        variable = made(case, strategy, initial)
        strategy.run(lambda: variable.assign_add(value))
        return variable.read_value()

    return operation


def assign_add_in_scope(case: Case) -> torch.Tensor:
    strategy = make_strategy(case.setup)
    variable = made(case, strategy, case.inputs["initial"])
    with strategy.scope():
        variable.assign_add(case.inputs["value"])
        return variable.read_value()


def assign_outside_run(case: Case) -> torch.Tensor:
    variable = made(case, make_strategy(case.setup))
    variable.assign(case.inputs["value"])
    return variable.read_value()


def assign_per_replica(case: Case) -> torch.Tensor:
    strategy = make_strategy(case.setup)
    variable = made(case, strategy)
    value = strategy.distribute_values_from_function(lambda ctx: torch.tensor(ctx.replica_id_in_sync_group + 1.0))
    with strategy.scope():
        variable.assign(value)
    return variable.read_value()


def assign_same_tensor(case: Case) -> torch.Tensor:
    strategy = make_strategy(case.setup)
    variable = made(case, strategy, [1.0, 1.0])
    value = torch.tensor(case.inputs["value_on_every_replica"])
    strategy.run(lambda: variable.assign(value))
    return variable.read_value()


def return_of_assign(case: Case) -> dict[str, str]:
    strategy = make_strategy(case.setup)
    variable = made(case, strategy)
    return {"type": type(strategy.run(lambda: variable.assign_add(torch.tensor(1.0)))).__name__}


def scatter_add(case: Case) -> torch.Tensor:
    strategy = make_strategy(case.setup)
    variable = made(case, strategy, torch.zeros(3, 1), aggregation=ts.VariableAggregation.SUM)

    def step() -> None:
        variable.scatter_add(sparse_rows([replica_id()], torch.ones(1, 1), (3, 1)))

    strategy.run(step)
    return variable.read_value()


def sync_on_read(case: Case) -> dict[str, Any]:
    strategy = make_strategy(case.setup)
    on_read = ts.VariableSynchronization.ON_READ
    variable = made(case, strategy, case.inputs["initial"], synchronization=on_read)

    def step() -> torch.Tensor:
        variable.assign_add(torch.tensor(replica_id() + 1.0))
        return variable.read_value() + 0

    return {"replica_values": strategy.run(step), "cross_replica_read": variable.read_value()}


def synchronization(case: Case) -> dict[str, str]:
    kinds = {
        "synchronization": ts.VariableSynchronization[case.inputs["synchronization"]],
        "aggregation": ts.VariableAggregation[case.inputs["aggregation"]],
    }
    return {"type": type(made(case, make_strategy(case.setup), **kinds)).__name__}


OPS: dict[str, Callable[[Case], Any]] = {
    "assign": in_run("assign"),
    "assign_add": in_run("assign_add"),
    "assign_sub": in_run("assign_sub"),
    "assign_add_in_scope": assign_add_in_scope,
    "assign_add_python_scalar": python_value(1.0, 2.0),
    "assign_add_python_value": python_value([5.0, 6.0], [1.0, 1.0]),
    "assign_cross_replica": assign_outside_run,
    "assign_per_replica_cross_replica": assign_per_replica,
    "assign_same_tensor": assign_same_tensor,
    "invalid_aggregation": lambda case: made(case, make_strategy(case.setup), aggregation="sum"),
    "return_of_assign_in_run": return_of_assign,
    "scatter_add_in_replica": scatter_add,
    "sync_on_read": sync_on_read,
    "synchronization": synchronization,
}


def _one_shared_object(case: Case) -> None:
    """Is one object for all replicas, not a PerReplica; its TensorFlow class name means nothing here."""
    strategy = make_strategy(case.setup)
    variable = made(case, strategy)
    returned: list[Any] = []

    def step() -> Any:
        returned.append(variable.assign_add(torch.tensor(1.0)))
        return returned[-1]

    assert not isinstance(strategy.run(step), ts.PerReplica)
    assert len(returned) == strategy.num_replicas_in_sync
    assert all(one is returned[0] for one in returned)


def _plain_variable(case: Case) -> None:
    """Is a `Variable`; which of TensorFlow's classes it would be means nothing here."""
    assert synchronization(case) == {"type": ts.Variable.__name__}


_SHARED, _CLASS = Difference(19, _one_shared_object), Difference(19, _plain_variable)
DIFFERS: dict[str, Difference] = {
    "variable_aggregation/return_of_assign_in_run/004": _SHARED,
    "variable_aggregation/return_of_assign_in_run/006": _SHARED,
    "variable_aggregation/return_of_assign_in_run/007": _SHARED,
    "variable_aggregation/return_of_assign_in_run/010": _SHARED,
    "variable_aggregation/synchronization/003": _CLASS,
    "variable_aggregation/synchronization/004": _CLASS,
    "variable_aggregation/synchronization/005": _CLASS,
    "variable_aggregation/synchronization/006": _CLASS,
}
NO_COUNTERPART: dict[str, str] = {}
