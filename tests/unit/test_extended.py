"""`strategy.extended`: what a variable is, where it lives, how it is updated, and where values are combined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.errors import ContextError

ONE_TWO = torch.tensor([1.0, 2.0])


@pytest.fixture(params=["one_device", "mirrored", "central"])
def strategy(request: pytest.FixtureRequest) -> Iterator[ts.Strategy]:
    made: ts.Strategy = {
        "one_device": lambda: ts.OneDeviceStrategy("cpu:3"),
        "mirrored": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"], gradient_reduce_op="sum"),
        "central": lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:7"),
    }[request.param]()
    yield made
    made.close()


def kind(strategy: ts.Strategy) -> str:
    return {ts.OneDeviceStrategy: "one_device", ts.MirroredStrategy: "mirrored"}.get(type(strategy), "central")


def per_replica(strategy: ts.Strategy) -> Any:
    """``(r + 1) * [1, 2]`` on replica r."""

    def step() -> torch.Tensor:
        context = ts.get_replica_context()
        assert context is not None
        return (context.replica_id_in_sync_group + 1) * ONE_TWO

    return strategy.run(step)


def variable(strategy: ts.Strategy, name: str | None = None) -> ts.Variable:
    with strategy.scope():
        return ts.Variable(ONE_TWO, aggregation=ts.VariableAggregation.SUM, name=name)


def lists(values: tuple[Any, ...]) -> list[Any]:
    return [value.tolist() for value in values]


def test_devices_and_flags(strategy: ts.Strategy) -> None:
    expected = {
        "one_device": (("cpu:3",), ("cpu:3",)),
        "mirrored": (("cpu:0", "cpu:1"), ("cpu:0", "cpu:1")),
        "central": (("cpu:0", "cpu:1"), ("cpu:7",)),
    }
    extended = strategy.extended
    assert (extended.worker_devices, extended.parameter_devices) == expected[kind(strategy)]
    assert extended.gradient_reduce_op is (ts.ReduceOp.SUM if kind(strategy) == "mirrored" else ts.ReduceOp.MEAN)
    assert extended.should_checkpoint
    assert extended.should_save_summary
    assert extended.experimental_should_init
    assert not extended.experimental_require_static_shapes
    assert extended.experimental_between_graph is (kind(strategy) == "central")


def test_device_of(strategy: ts.Strategy) -> None:
    with strategy.scope():
        layer = nn.BatchNorm1d(1)
    v, parameter, buffer = variable(strategy), layer.weight, layer.running_mean
    first = strategy.extended.parameter_devices[0]
    of = strategy.extended.device_of
    assert [of(one) for one in (v, parameter, buffer)] == [first] * 3
    inside = strategy.local_results(strategy.run(lambda: (of(v), of(parameter))))
    devices = strategy.extended.worker_devices if kind(strategy) == "mirrored" else [first] * len(inside)
    assert [list(pair) for pair in inside] == [[device, device] for device in devices]
    with pytest.raises(ValueError, match="device_of needs a variable of this strategy"):
        of(torch.ones(1))


def test_variables_of_a_strategy(strategy: ts.Strategy) -> None:
    with strategy.scope():
        layer = nn.BatchNorm1d(1)
    created = strategy.extended.variable_created_in_scope
    for own in (variable(strategy), *strategy.local_results(variable(strategy)), layer.weight, layer.running_mean):
        assert created(own)
    for other in (ts.Variable(1.0), nn.Linear(1, 1).weight, torch.ones(1), None, 3):
        assert not created(other)
    assert ts.get_strategy().extended.variable_created_in_scope(ts.Variable(1.0))


def test_colocate_vars_with(strategy: ts.Strategy) -> None:
    v = variable(strategy)
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        near = ts.Variable(0.0)
    assert strategy.extended.device_of(near) == strategy.extended.device_of(v)
    with pytest.raises(ContextError, match="outside of the scope"), strategy.extended.colocate_vars_with(v):
        pass
    for bad in (ts.Variable(1.0), torch.ones(1), None):
        with strategy.scope(), pytest.raises(ValueError, match="colocate_vars_with needs"):
            strategy.extended.colocate_vars_with(bad).__enter__()


def test_non_slot_devices(strategy: ts.Strategy) -> None:
    variables = [variable(strategy, "b"), variable(strategy, "a")]
    found = strategy.extended.non_slot_devices(variables)
    assert found is variables[1] if kind(strategy) == "central" else found == strategy.extended.parameter_devices
    plain = [ts.Variable(0.0, name="z"), ts.Variable(0.0, name="y")]
    assert ts.get_strategy().extended.non_slot_devices(plain) is plain[1]


def test_containers_and_reading(strategy: ts.Strategy) -> None:
    v = variable(strategy)
    extended = strategy.extended
    assert all(extended.value_container(component) is v for component in strategy.local_results(v))
    assert extended.value_container(ONE_TWO) is ONE_TWO
    parameter = nn.Parameter(ONE_TWO.clone())
    for one in (v, parameter):
        value = extended.read_var(one)
        assert torch.equal(value, ONE_TWO)
        value.zero_()
        assert extended.read_var(one).tolist() == [1, 2]
    with pytest.raises(ValueError, match="read_var needs a variable"):
        extended.read_var("v")


# -- update ---------------------------------------------------------------------------------------------------------


def test_update_of_a_variable(strategy: ts.Strategy) -> None:
    v = variable(strategy)
    seen: list[tuple[bool, bool]] = []

    def add(component: ts.Variable, value: Any, *, times: int) -> torch.Tensor:
        seen.append((component is v, ts.in_cross_replica_context()))
        return component.assign_add(value * times).read_value()

    result = strategy.extended.update(v, add, args=(per_replica(strategy),), kwargs={"times": 10})
    if kind(strategy) == "mirrored":
        assert isinstance(result, ts.Mirrored)
        assert lists(result.values) == lists(strategy.local_results(v)) == [[11, 22], [21, 42]]
    else:
        assert result.tolist() == v.tolist() == [11, 22]
    assert seen == [(kind(strategy) == "one_device", True)] * len(strategy.local_results(v))
    ungrouped = strategy.extended.update(v, lambda one: one + 1, group=False)
    assert isinstance(ungrouped, tuple)
    assert len(ungrouped) == len(strategy.local_results(v))


def test_update_returns_the_variable_that_its_components_make_up(strategy: ts.Strategy) -> None:
    v = variable(strategy)
    result = strategy.extended.update(v, lambda one: one.assign_add(1.0))
    assert strategy.extended.value_container(result) is v
    assert strategy.extended.update(v, lambda _: None) is None


def test_update_means_the_component_of_its_replica_everywhere() -> None:
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    v, other = variable(strategy), variable(strategy)
    strategy.local_results(other)[1].assign([5.0, 5.0])
    strategy.extended.update(v, lambda one: (one.assign(other), other.assign_add(1.0)))
    assert lists(strategy.local_results(v)) == [[1, 2], [5, 5]]
    assert lists(strategy.local_results(other)) == [[2, 3], [6, 6]]
    strategy.close()


def test_update_in_a_replica_runs_once_for_all(strategy: ts.Strategy) -> None:
    v = variable(strategy)
    strategy.run(lambda: strategy.extended.update(v, lambda one, x: one.assign_add(x), args=(ONE_TWO,)))
    assert lists(strategy.local_results(v)) == [[2, 4]] * len(strategy.local_results(v))


def test_update_of_a_parameter(strategy: ts.Strategy) -> None:
    with strategy.scope():
        layer = nn.Linear(2, 1, bias=False)
    strategy.extended.update(layer.weight, lambda weight, x: weight.copy_(x[None]), args=(per_replica(strategy),))
    assert layer.weight.tolist() == [[1, 2]]
    strategy.run(lambda: strategy.extended.update(layer.weight, lambda weight: weight.mul_(2)))
    assert layer.weight.tolist() == [[2, 4]]
    outputs = strategy.local_results(strategy.run(lambda: layer(ONE_TWO).detach()))
    assert lists(outputs) == [[10]] * strategy.num_replicas_in_sync


def test_update_of_what_is_no_variable(strategy: ts.Strategy) -> None:
    if kind(strategy) == "one_device":
        assert strategy.extended.update(ONE_TWO, lambda one: one * 2).tolist() == [2, 4]
        return
    for bad in (ONE_TWO, ts.Variable(1.0), None):
        with pytest.raises(ValueError, match="update needs a variable of"):
            strategy.extended.update(bad, lambda one: one)


def test_update_non_slot(strategy: ts.Strategy) -> None:
    calls: list[list[float]] = []
    places = strategy.extended.non_slot_devices([variable(strategy)])
    strategy.extended.update_non_slot(places, lambda x: calls.append(x.tolist()), args=(per_replica(strategy),))
    assert calls == ([[1, 2], [2, 4]] if kind(strategy) == "mirrored" else [[1, 2]])


# -- combining ------------------------------------------------------------------------------------------------------


def test_reduce_to(strategy: ts.Strategy) -> None:
    value, v = per_replica(strategy), variable(strategy)
    with strategy.scope():
        layer = nn.Linear(2, 1)
    reduce_to = strategy.extended.reduce_to
    total = [1, 2] if kind(strategy) == "one_device" else [3, 6]
    for destinations in ("cpu:5", "/device:CPU:1", torch.device("cpu"), layer.weight):
        result = reduce_to("sum", value, destinations)
        assert isinstance(result, torch.Tensor)
        assert result.tolist() == total
    for destinations, several in ((value, True), (v, kind(strategy) == "mirrored")):
        result = reduce_to(ts.ReduceOp.SUM, value, destinations)
        assert isinstance(result, ts.Mirrored) is (several and kind(strategy) != "one_device")
        assert all(one.tolist() == total for one in strategy.local_results(result))
    assert lists(tuple(strategy.extended.batch_reduce_to("sum", [(value, "cpu:0")] * 2))) == [total, total]


def test_reduce_to_refuses(strategy: ts.Strategy) -> None:
    value = per_replica(strategy)
    for op in ("product", ts.VariableAggregation.SUM, None):
        with pytest.raises((ValueError, TypeError), match="reduce_op"):
            strategy.extended.reduce_to(op, value, "cpu:0")  # type: ignore[arg-type]
    for extended, single in ((strategy.extended, value), (ts.get_strategy().extended, ONE_TWO)):
        for destinations in (None, "", ["cpu:0"], 3):
            with pytest.raises(ValueError, match="destinations"):
                extended.reduce_to("sum", single, destinations)
            with pytest.raises(ValueError, match="destinations"):
                extended.broadcast_to(ONE_TWO, destinations)
    if kind(strategy) == "one_device":
        assert strategy.extended.batch_reduce_to("sum", []) == []
        return
    with pytest.raises(ValueError, match="at least one"):
        strategy.extended.batch_reduce_to("sum", [])


def test_broadcast_to(strategy: ts.Strategy) -> None:
    copies = strategy.local_results(strategy.extended.broadcast_to(ONE_TWO, per_replica(strategy)))
    assert lists(copies) == [[1, 2]] * strategy.num_replicas_in_sync
    assert strategy.extended.broadcast_to(2.5, "cpu:0") == 2.5


def test_call_for_each_replica(strategy: ts.Strategy) -> None:
    result = strategy.extended.call_for_each_replica(lambda x, y: x + y, args=[ONE_TWO], kwargs={"y": 1})
    assert lists(strategy.local_results(result)) == [[2, 3]] * strategy.num_replicas_in_sync
