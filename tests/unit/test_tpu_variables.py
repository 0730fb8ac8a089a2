"""A TPU strategy's variables: how they are cut, by rules and by annotation, and `ts.Variable` in a step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import assert_as_mirrored, fake_tpu, here, own, rows_of
from torchstrat.errors import InvalidArgumentError, UnsupportedError
from torchstrat.sharding.grid import DeviceGrid, Sharding
from torchstrat.testing.fake_spmd import FakeSpmdRuntime
from torchstrat.tpu.variables import DeviceVariables
from torchstrat.variables import VariableRegistry

SUM, MEAN = ts.VariableAggregation.SUM, ts.VariableAggregation.MEAN
FIRST, NONE = ts.VariableAggregation.ONLY_FIRST_REPLICA, ts.VariableAggregation.NONE
ON_READ = ts.VariableSynchronization.ON_READ


def annotation(strategy: ts.TPUStrategy, tensor: torch.Tensor) -> Sharding | None:
    runtime = strategy._system.runtime
    assert isinstance(runtime, FakeSpmdRuntime)
    return runtime.annotation(tensor)


def spec(strategy: ts.TPUStrategy, tensor: torch.Tensor) -> Any:
    found = annotation(strategy, tensor)
    return None if found is None else found.spec


# -- how they are cut -----------------------------------------------------------------------------------------------


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


RULES = {"0.weight": ("d0", None), "0.bias": ("d0",), "2.weight": (None, "d0")}


def trained(strategy: ts.TPUStrategy) -> tuple[nn.Module, torch.optim.Optimizer]:
    with strategy.scope():
        model = block()
        optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    strategy.run(step, args=(own(torch.randn(4, 4), torch.randn(4, 4)),))
    return model, optimizer


def test_rules_cut_parameters_and_optimizer_state_follows() -> None:
    with fake_tpu(2, 4, sharding_rules=RULES) as strategy:
        model, optimizer = trained(strategy)
        expected = {
            "0.weight": (("d0",), ()),
            "0.bias": (("d0",),),
            "1.weight": ((),),
            "1.bias": ((),),
            "2.weight": ((), ("d0",)),
            "2.bias": ((),),
        }
        for name, parameter in model.named_parameters():
            assert spec(strategy, parameter) == expected[name]
            for key in ("exp_avg", "exp_avg_sq"):
                assert spec(strategy, optimizer.state[parameter][key]) == expected[name]
        assert spec(strategy, model[1].running_mean) == ((),)


def test_rules_of_a_mesh() -> None:
    with fake_tpu(1, 4, sharding_rules={"0.weight": ("d0", "d1")}, logical_mesh_shape=(2, 2)) as strategy:
        with strategy.scope():
            model = block()
        assert spec(strategy, model[0].weight) == (("d0",), ("d1",))
        assert strategy.run(lambda: model[0].weight) is model[0].weight
    with (
        pytest.raises(InvalidArgumentError, match=r"logical_mesh_shape=.* has 6 places, and a replica has 4"),
        fake_tpu(1, 4, logical_mesh_shape=(2, 3)),
    ):
        pass


def test_names_are_those_of_the_outermost_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block()

    with fake_tpu(1, 2, sharding_rules={"inner.0.weight": ("d0", None)}) as strategy:
        with strategy.scope():
            model = Outer()
        assert spec(strategy, model.inner[0].weight) == (("d0",), ())


def test_a_rule_that_decides_nothing_is_an_error_at_the_first_run() -> None:
    with fake_tpu(2, 2, sharding_rules={"0.wieght": ("d0", None), "2.weight": (None, "d0")}) as strategy:
        with strategy.scope():
            model = block()
        with pytest.raises(InvalidArgumentError, match=r"(?s)decide no parameter.*'0\.wieght'.*0\.weight"):
            strategy.run(model, args=(own(torch.ones(2, 4), torch.ones(2, 4)),))


def test_a_rule_that_does_not_fit_is_an_error_when_the_scope_closes() -> None:
    with fake_tpu(1, 3, sharding_rules={"0.weight": ("d0", None)}) as strategy:
        with pytest.raises(InvalidArgumentError, match=r"'0\.weight' cuts dimension 0 .* does not divide by 3"):
            with strategy.scope():
                model = block()
        assert spec(strategy, model[0].weight) is None


def test_annotations_in_the_scope_cut_variables_for_good() -> None:
    with fake_tpu(2, 2) as strategy:
        with strategy.scope():
            model = block()
            assert strategy.split_to_logical_devices(model[0].weight, [2, 1]) is model[0].weight
            assert strategy.replicate_to_logical_devices(model[0].bias) is model[0].bias
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):

            def step(x: torch.Tensor) -> None:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

            strategy.run(step, args=(own(torch.randn(4, 4), torch.randn(4, 4)),))
            assert spec(strategy, model[0].weight) == (("d0",), ())
            assert spec(strategy, optimizer.state[model[0].weight]["momentum_buffer"]) == (("d0",), ())
        # The last word counts, and an annotation counts more than a rule.
        strategy.split_to_logical_devices(model[0].weight, [1, 2])
        assert spec(strategy, model[0].weight) == ((), ("d1",))


def test_an_annotation_in_the_scope_counts_more_than_a_rule() -> None:
    with fake_tpu(1, 2, sharding_rules={"0.weight": ("d0", None), "2.weight": ("d0", None)}) as strategy:
        with strategy.scope():
            model = block()
            strategy.split_to_logical_devices(model[0].weight, [1, 2])
        assert spec(strategy, model[0].weight) == ((), ("d1",))
        assert spec(strategy, model[2].weight) == (("d0",), ())


def test_what_is_known_of_variables_keeps_none_alive() -> None:
    with fake_tpu(1, 2, sharding_rules={"0.weight": ("d0", None)}) as strategy:
        with strategy.scope():
            model = block()
        gone = weakref.ref(model[0].weight)
        del model
        gc.collect()
        assert gone() is None


# -- to the devices -------------------------------------------------------------------------------------------------


class Elsewhere:
    """A runtime whose device is torch's meta device: from a CPU to a CPU one cannot see a tensor go."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.annotated: list[tuple[int, Sharding]] = []

    def annotate(self, tensor: torch.Tensor, sharding: Sharding, grid: DeviceGrid) -> None:
        assert tensor.device == self.device
        self.annotated.append((id(tensor), sharding))


def device_variables() -> tuple[VariableRegistry, Elsewhere, DeviceVariables]:
    registry, runtime = VariableRegistry(lambda: True), Elsewhere()
    return registry, runtime, DeviceVariables(registry, runtime, DeviceGrid(((0, 1),)), None)  # type: ignore[arg-type]


def test_variables_move_as_the_same_objects() -> None:
    registry, runtime, variables = device_variables()
    registry.open()
    try:
        model = block()
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
        weight = model[0].weight
        weight.grad = torch.ones(8, 4)
        weight.register_hook(lambda gradient: gradient)
        weight.register_post_accumulate_grad_hook(lambda _: None)
        hooks, accumulated = weight._backward_hooks, weight._post_accumulate_grad_hooks
        variables.shard(model[2].weight, Sharding.split((1, 2)))
        assert runtime.annotated == []  # not before it is there
    finally:
        registry.close()
    variables.take()
    assert model[0].weight is weight
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.device == runtime.device
        assert variables.is_known(tensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert not model[0].bias.requires_grad
    assert weight.grad is not None
    assert weight.grad.device == runtime.device
    assert (weight._backward_hooks, weight._post_accumulate_grad_hooks) == (hooks, accumulated)
    assert optimizer.param_groups[0]["params"][0] is weight
    assert optimizer.state[weight]["sum"].device == runtime.device
    assert optimizer.state[weight]["step"].device.type == "cpu"
    assert (id(model[2].weight), Sharding.split((1, 2))) in runtime.annotated
    annotated = len(runtime.annotated)
    variables.take()
    assert len(runtime.annotated) == annotated  # nothing is left to do


def test_what_cannot_live_there_is_refused() -> None:
    registry, _, variables = device_variables()
    registry.open()
    try:
        holder = nn.Module()
        holder.register_buffer("table", torch.eye(2).to_sparse())
    finally:
        registry.close()
    with pytest.raises(UnsupportedError, match=r"layout torch\.sparse_coo and shape \(2, 2\).*use a dense one"):
        variables.take()


# -- ts.Variable ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
@pytest.mark.parametrize("edit", ["assign", "assign_add", "assign_sub"])
def test_assignments_in_a_step(aggregation: ts.VariableAggregation, edit: str) -> None:
    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            v = ts.Variable([1.0, 2.0], dtype=torch.float64, aggregation=aggregation)

        def step(x: torch.Tensor) -> torch.Tensor:
            getattr(v, edit)(x.mean(dim=0)[:2])
            return v * 2

        found = [strategy.run(step, args=(rows_of((2, 2), seed=seed),)) for seed in range(2)]
        return [found, v.read_value()]

    assert_as_mirrored(program)


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST, NONE])
def test_values_that_are_the_same_on_all_replicas(aggregation: ts.VariableAggregation) -> None:
    def outcome(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            v = ts.Variable(1.0, aggregation=aggregation)
        try:
            strategy.run(lambda: v.assign(5.0))
        except ValueError as error:
            return type(error), str(error)[:40]
        return float(v.read_value())

    central = ts.CentralStorageStrategy(["cpu:0", "cpu:1"])
    expected = outcome(central)
    central.close()
    with fake_tpu(2) as strategy:
        assert outcome(strategy) == expected


def test_a_variable_of_each_replicas_own_numbers() -> None:
    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            v = ts.Variable(0.0, dtype=torch.float64, aggregation=SUM)
        strategy.run(lambda x: v.assign_add(x.sum()), args=(rows_of((3, 1)),))
        return v.read_value()

    assert_as_mirrored(program)


def test_a_variable_is_read_and_trained_in_a_step() -> None:
    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            scale = ts.Variable(2.0, trainable=False, dtype=torch.float64)
            layer = nn.Linear(3, 1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (layer(x) * scale).square().mean()
            loss.backward()
            return loss.detach() + scale

        return [strategy.run(step, args=(rows_of((2, 2)),)), layer.weight.grad]

    assert_as_mirrored(program)


def test_assignments_outside_of_a_step() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            v = ts.Variable(1.0, aggregation=MEAN)
        v.assign(3.0)
        v.assign_add(1.0)
        assert float(v) == 4.0
        assert len(strategy.local_results(v)) == 1
        result = strategy.run(lambda: v + torch.as_tensor(here().replica_id_in_sync_group))
        assert [float(one) for one in result.values] == [4.0, 5.0]


def test_variables_that_are_added_up_when_read() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            v = ts.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        for _ in range(2):
            strategy.run(lambda x: v.assign_add(x), args=(own(1.0, 2.0),))
        assert float(v) == 6.0
