"""`Strategy.extended`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.areas.run import integer, replica_id
from tests.conformance.differences import raises, recorded_devices
from tests.conformance.harness import Case, Difference, make_strategy, outcome
from torchstrat.errors import InvalidArgumentError

ONE_TWO = torch.tensor([1.0, 2.0])
BAD_DESTINATIONS: dict[str, Any] = {"None": None, "empty string": ""}


def per_replica(strategy: ts.Strategy) -> Any:
    """``(r + 1) * [1, 2]`` on replica r: a bare tensor for one replica."""
    return strategy.run(lambda: (replica_id() + 1) * ONE_TWO)


def variable_of(strategy: ts.Strategy) -> ts.Variable:
    with strategy.scope():
        return ts.Variable(ONE_TWO, aggregation=ts.VariableAggregation.SUM)


def reduce_to(case: Case, destinations: Any, op: Any = "SUM") -> Any:
    strategy = make_strategy(case.setup)
    value = per_replica(strategy)
    where = value if destinations is per_replica else destinations
    with strategy.scope():
        return strategy.extended.reduce_to(op, value, variable_of(strategy) if where is variable_of else where)


def with_bad_destination(case: Case) -> Any:
    return reduce_to(case, BAD_DESTINATIONS[case.inputs["destinations"]])


def call_for_each_replica(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    with strategy.scope():
        arguments = tuple(integer(value) for value in case.inputs["args"])
        return strategy.extended.call_for_each_replica(lambda x: x + replica_id(), args=arguments)


def colocate(case: Case) -> dict[str, bool]:
    strategy = make_strategy(case.setup)
    with strategy.scope():
        first = ts.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            second = ts.Variable(2.0)
    return {"same_device": strategy.extended.device_of(first) == strategy.extended.device_of(second)}


def colocate_with_bad(case: Case) -> None:
    strategy = make_strategy(case.setup)
    bad = {"plain variable": ts.Variable(1.0), "tensor": torch.tensor(1.0), "None": None}[case.inputs["with"]]
    with strategy.scope(), strategy.extended.colocate_vars_with(bad):
        ts.Variable(2.0)


def colocate_out_of_scope(case: Case) -> dict[str, str]:
    strategy = make_strategy(case.setup)
    with strategy.scope():
        first = ts.Variable(1.0)
    with strategy.extended.colocate_vars_with(first):
        return {"type": type(ts.Variable(2.0)).__name__}


def devices(case: Case) -> dict[str, list[str]]:
    extended = make_strategy(case.setup).extended
    return {"worker_devices": [*extended.worker_devices], "parameter_devices": [*extended.parameter_devices]}


def flags(case: Case) -> dict[str, Any]:
    extended = make_strategy(case.setup).extended
    return {name: outcome(lambda name=name: getattr(extended, name)) for name in case.expect}


def non_slot_devices(case: Case) -> dict[str, Any]:
    strategy = make_strategy(case.setup)
    with strategy.scope():
        b, a = ts.Variable(1.0, name="b"), ts.Variable(1.0, name="a")
    found = strategy.extended.non_slot_devices([b, a])
    several = isinstance(found, tuple)
    return {
        "type": type(found).__name__,
        "name": None if several else found.name,
        "devices": [*found] if several else None,
    }


def update(case: Case) -> Any:
    strategy = make_strategy(case.setup)
    variable = variable_of(strategy)
    variable.assign_add(torch.ones(2))  # as in the recorded program, before this call
    with strategy.scope():
        return strategy.extended.update(variable, lambda one: one.read_value() + 0, group=case.inputs["group"])


def updated(case: Case, arguments: Callable[[ts.Strategy], tuple[Any, ...]], name: str) -> torch.Tensor:
    """The variable after one of its methods was called through ``update`` in cross-replica context."""
    strategy = make_strategy(case.setup)
    variable = variable_of(strategy)
    values = arguments(strategy)
    with strategy.scope():
        strategy.extended.update(variable, lambda one, value: getattr(one, name)(value), args=values)
    return variable.read_value()


def update_in_replica_context(case: Case) -> torch.Tensor:
    strategy = make_strategy(case.setup)
    variable = variable_of(strategy)
    strategy.run(lambda: strategy.extended.update(variable, lambda one: one.assign_add(torch.ones(2))))
    return variable.read_value()


def value_container(case: Case) -> bool:
    strategy = make_strategy(case.setup)
    variable = variable_of(strategy)
    component = strategy.local_results(variable)[0]
    return strategy.extended.value_container(component) is variable


OPS: dict[str, Callable[[Case], Any]] = {
    "batch_reduce_to_empty": lambda case: make_strategy(case.setup).extended.batch_reduce_to("SUM", []),
    "call_for_each_replica": call_for_each_replica,
    "colocate_vars_with": colocate,
    "colocate_vars_with_bad": colocate_with_bad,
    "colocate_vars_with_out_of_scope": colocate_out_of_scope,
    "devices": devices,
    "flags": flags,
    "non_slot_devices": non_slot_devices,
    "reduce_to_aggregation_enum": lambda case: reduce_to(case, "cpu:0", ts.VariableAggregation.SUM),
    "reduce_to_bad_destination": with_bad_destination,
    "reduce_to_device": lambda case: reduce_to(case, case.inputs["destinations"], case.inputs["reduce_op"]),
    "reduce_to_value": lambda case: reduce_to(case, per_replica, case.inputs["reduce_op"]),
    "reduce_to_variable": lambda case: reduce_to(case, variable_of, case.inputs["reduce_op"]),
    "update_group_false": update,
    "update_group_true": update,
    "update_in_cross_replica": lambda case: updated(case, lambda _: tuple(case.inputs["args"]), "assign_add"),
    "update_in_replica_ctx": update_in_replica_context,
    "update_per_replica_arg": lambda case: updated(case, lambda strategy: (per_replica(strategy),), "assign"),
    "value_container": value_container,
}


def _any_variable(case: Case) -> None:
    """Makes an ordinary variable; its TensorFlow class name means nothing here."""
    assert colocate_out_of_scope(case) == {"type": ts.Variable.__name__}


def _smallest_name(case: Case) -> None:
    """Is the variable of the smallest name, without the ``:0`` of TensorFlow's outputs."""
    assert non_slot_devices(case) == {"type": ts.Variable.__name__, "name": "a", "devices": None}


DIFFERS: dict[str, Difference] = {
    "extended/colocate_vars_with_out_of_scope/004": Difference(19, _any_variable),
    "extended/devices/002": recorded_devices(devices),
    "extended/devices/003": recorded_devices(devices),
    "extended/non_slot_devices/002": recorded_devices(non_slot_devices),
    "extended/non_slot_devices/003": recorded_devices(non_slot_devices),
    "extended/non_slot_devices/004": Difference(19, _smallest_name),
    "extended/reduce_to_bad_destination/010": raises(
        6, InvalidArgumentError, "destinations must be a device name", with_bad_destination
    ),
}
NO_COUNTERPART: dict[str, str] = {}
FIELDS_WITHOUT_COUNTERPART = {"_global_batch_size": "is private, read by Keras only"}
