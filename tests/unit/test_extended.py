"""`strategy.extended`: what a variable is, where it lives, how it is updated, and where values are combined.

What TensorFlow has been recorded to do is in `tests.conformance.areas.extended`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.replicas import (
    BUFFERS,
    buffer_after_two_runs,
    buffer_of_an_evaluated_module_after_a_failure,
    cpus,
    own_buffers_after_a_failure,
    replica,
)
from torchstrat.errors import ContextError, InvalidArgumentError

ONE_TWO = torch.tensor([1.0, 2.0])
MADE: dict[str, Callable[[], ts.Strategy]] = {
    "one_device": lambda: ts.OneDeviceStrategy("cpu:3"),
    "mirrored": lambda: ts.MirroredStrategy(cpus(2), gradient_reduce_op="sum"),
    "central": lambda: ts.CentralStorageStrategy(cpus(2), parameter_device="cpu:7"),
}


@pytest.fixture(params=MADE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def strategy(kind: str) -> Iterator[ts.Strategy]:
    made = MADE[kind]()
    yield made
    made.close()


def per_replica(strategy: ts.Strategy) -> Any:
    """``(r + 1) * [1, 2]`` on replica r."""
    return strategy.run(lambda: (replica() + 1) * ONE_TWO)


def variable(strategy: ts.Strategy, name: str | None = None) -> ts.Variable:
    with strategy.scope():
        return ts.Variable(ONE_TWO, aggregation=ts.VariableAggregation.SUM, name=name)


def lists(values: Any) -> list[Any]:
    return [value.tolist() for value in values]


# -- variables ---------------------------------------------------------------------------------------------------------


def test_devices_and_flags(strategy: ts.Strategy, kind: str) -> None:
    both = ("cpu:0", "cpu:1")
    expected = {"one_device": (("cpu:3",),) * 2, "mirrored": (both, both), "central": (both, ("cpu:7",))}
    extended = strategy.extended
    assert (extended.worker_devices, extended.parameter_devices) == expected[kind]
    assert extended.gradient_reduce_op is (ts.ReduceOp.SUM if kind == "mirrored" else ts.ReduceOp.MEAN)
    assert extended.should_checkpoint is extended.should_save_summary is extended.experimental_should_init is True
    assert not extended.experimental_require_static_shapes
    assert extended.experimental_between_graph is (kind == "central")


def test_what_is_a_variable_of_a_strategy_and_where_it_is(strategy: ts.Strategy, kind: str) -> None:
    with strategy.scope():
        layer = nn.BatchNorm1d(1)
    v, of, created = variable(strategy), strategy.extended.device_of, strategy.extended.variable_created_in_scope
    first = strategy.extended.parameter_devices[0]
    assert [of(one) for one in (v, layer.weight, layer.running_mean)] == [first] * 3
    inside = strategy.local_results(strategy.run(lambda: (of(v), of(layer.weight))))
    devices = strategy.extended.worker_devices if kind == "mirrored" else [first] * len(inside)
    assert [list(pair) for pair in inside] == [[device, device] for device in devices]
    with pytest.raises(ValueError, match="device_of needs a variable of this strategy"):
        of(torch.ones(1))
    for own in (v, *strategy.local_results(v), layer.weight, layer.running_mean):
        assert created(own)
    for other in (ts.Variable(1.0), nn.Linear(1, 1).weight, torch.ones(1), None, 3):
        assert not created(other)
    assert ts.get_strategy().extended.variable_created_in_scope(ts.Variable(1.0))


def test_colocation_and_non_slot_devices(strategy: ts.Strategy, kind: str) -> None:
    v, extended = variable(strategy), strategy.extended
    with strategy.scope(), extended.colocate_vars_with(v):
        near = ts.Variable(0.0)
    assert extended.device_of(near) == extended.device_of(v)
    with pytest.raises(ContextError, match="outside of the scope"), extended.colocate_vars_with(v):
        pass
    for bad in (ts.Variable(1.0), torch.ones(1), None):
        with strategy.scope(), pytest.raises(ValueError, match="colocate_vars_with needs"):
            extended.colocate_vars_with(bad).__enter__()
    variables = [variable(strategy, "b"), variable(strategy, "a")]
    found = extended.non_slot_devices(variables)
    assert found is variables[1] if kind == "central" else found == extended.parameter_devices
    calls: list[list[float]] = []
    extended.update_non_slot(found, lambda x: calls.append(x.tolist()), args=(per_replica(strategy),))
    assert calls == ([[1, 2], [2, 4]] if kind == "mirrored" else [[1, 2]])


def test_containers_and_reading(strategy: ts.Strategy) -> None:
    v, extended = variable(strategy), strategy.extended
    assert all(extended.value_container(component) is v for component in strategy.local_results(v))
    assert extended.value_container(ONE_TWO) is ONE_TWO
    for one in (v, nn.Parameter(ONE_TWO.clone())):
        extended.read_var(one).zero_()
        assert extended.read_var(one).tolist() == [1, 2]
    with pytest.raises(ValueError, match="read_var needs a variable"):
        extended.read_var("v")


# -- update ------------------------------------------------------------------------------------------------------------


def test_update_of_a_variable(strategy: ts.Strategy, kind: str) -> None:
    v, update = variable(strategy), strategy.extended.update
    seen: list[tuple[bool, bool]] = []

    def add(component: ts.Variable, value: Any, *, times: int) -> torch.Tensor:
        seen.append((component is v, ts.in_cross_replica_context()))
        return component.assign_add(value * times).read_value()

    result = update(v, add, args=(per_replica(strategy),), kwargs={"times": 10})
    components = strategy.local_results(v)
    if kind == "mirrored":
        assert isinstance(result, ts.Mirrored)
        assert lists(result.values) == lists(components) == [[11, 22], [21, 42]]
    else:
        assert result.tolist() == v.tolist() == [11, 22]
    assert seen == [(kind == "one_device", True)] * len(components)
    ungrouped = update(v, lambda one: one + 1, group=False)
    assert isinstance(ungrouped, tuple)
    assert len(ungrouped) == len(components)
    assert strategy.extended.value_container(update(v, lambda one: one.assign_add(1.0))) is v
    assert update(v, lambda _: None) is None


def test_update_means_the_component_of_its_replica_everywhere() -> None:
    strategy = MADE["mirrored"]()
    v, other = variable(strategy), variable(strategy)
    strategy.local_results(other)[1].assign([5.0, 5.0])
    strategy.extended.update(v, lambda one: (one.assign(other), other.assign_add(1.0)))
    assert lists(strategy.local_results(v)) == [[1, 2], [5, 5]]
    assert lists(strategy.local_results(other)) == [[2, 3], [6, 6]]
    strategy.close()


def test_update_in_a_replica_runs_once_for_all(strategy: ts.Strategy) -> None:
    v, update = variable(strategy), strategy.extended.update
    strategy.run(lambda: update(v, lambda one, x: one.assign_add(x), args=(ONE_TWO,)))
    assert lists(strategy.local_results(v)) == [[2, 4]] * len(strategy.local_results(v))
    with strategy.scope():
        layer = nn.Linear(2, 1, bias=False)
    update(layer.weight, lambda weight, x: weight.copy_(x[None]), args=(per_replica(strategy),))
    assert layer.weight.tolist() == [[1, 2]]
    strategy.run(lambda: update(layer.weight, lambda weight: weight.mul_(2)))
    assert layer.weight.tolist() == [[2, 4]]
    outputs = strategy.local_results(strategy.run(lambda: layer(ONE_TWO).detach()))
    assert lists(outputs) == [[10]] * strategy.num_replicas_in_sync


def test_update_of_what_is_no_variable(strategy: ts.Strategy, kind: str) -> None:
    if kind == "one_device":
        assert strategy.extended.update(ONE_TWO, lambda one: one * 2).tolist() == [2, 4]
        return
    for bad in (ONE_TWO, ts.Variable(1.0), None):
        with pytest.raises(ValueError, match="update needs a variable of"):
            strategy.extended.update(bad, lambda one: one)


# -- combining ---------------------------------------------------------------------------------------------------------


def test_reduce_to_and_broadcast_to(strategy: ts.Strategy, kind: str) -> None:
    value, v, reduce_to = per_replica(strategy), variable(strategy), strategy.extended.reduce_to
    total = [1, 2] if kind == "one_device" else [3, 6]
    with strategy.scope():
        layer = nn.Linear(2, 1)
    for destinations in ("cpu:5", torch.device("cpu"), layer.weight):
        result = reduce_to("sum", value, destinations)
        assert isinstance(result, torch.Tensor)
        assert result.tolist() == total
    result = reduce_to(ts.ReduceOp.SUM, value, v)
    assert isinstance(result, ts.Mirrored) is (kind == "mirrored")
    assert all(one.tolist() == total for one in strategy.local_results(result))
    assert lists(strategy.extended.batch_reduce_to("sum", [(value, "cpu:0")] * 2)) == [total, total]
    copies = strategy.local_results(strategy.extended.broadcast_to(ONE_TWO, value))
    assert lists(copies) == [[1, 2]] * strategy.num_replicas_in_sync
    assert strategy.extended.broadcast_to(2.5, "cpu:0") == 2.5


def test_reduce_to_refuses(strategy: ts.Strategy, kind: str) -> None:
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
    if kind != "one_device":
        with pytest.raises(ValueError, match="at least one"):
            strategy.extended.batch_reduce_to("sum", [])


# -- buffers ------------------------------------------------------------------------------------------------------


class Noting(nn.Module):
    seen: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=dtype))

    def forward(self) -> None:
        self.seen.copy_(torch.tensor(2.0) * (1 + replica()))


@pytest.mark.parametrize("make", [MADE["mirrored"], MADE["central"], lambda: ts.testing.fake_tpu_strategy(2, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_a_mean_that_is_asked_for_is_one_in_whichever_mode(make: Callable[[], ts.Strategy], training: bool) -> None:
    strategy = make()
    with strategy.scope():
        module = Noting().train(training)
    strategy.extended.set_aggregation(module, "seen", "mean")
    strategy.run(module)
    strategy.close()
    assert float(module.seen) == 3


several = pytest.mark.parametrize("kind", ["mirrored", "central"])


@several
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_becomes_one(strategy: ts.Strategy, name: str) -> None:
    assert buffer_after_two_runs(strategy, name) == BUFFERS[name][-1]


@several
def test_buffers_that_replicas_keep_are_as_they_were_after_a_failed_run(strategy: ts.Strategy) -> None:
    assert own_buffers_after_a_failure(strategy) == [2, 4]
    assert buffer_of_an_evaluated_module_after_a_failure(strategy) == 1


def test_there_is_no_sum_of_truth_values(strategy: ts.Strategy) -> None:
    with pytest.raises(InvalidArgumentError, match=r"buffer of torch.bool.*'only_first_replica'.*integers"):
        strategy.extended.set_aggregation(Noting(torch.bool), "seen", "sum")


def test_there_is_no_mean_of_whole_numbers(strategy: ts.Strategy) -> None:
    module = Noting(torch.int64)
    with pytest.raises(InvalidArgumentError, match=r"buffer of torch.int64.*'only_first_replica'"):
        strategy.extended.set_aggregation(module, "seen", "mean")
    if strategy.num_replicas_in_sync > 1:
        with pytest.warns(UserWarning, match=r"is the first replica's .*, and 'only_first_replica' says that this"):
            strategy.run(module)
