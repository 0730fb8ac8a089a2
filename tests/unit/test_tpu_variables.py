"""A TPU strategy's variables and annotations: how tensors are cut, in a step and outside, and `ts.Variable`."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.tpu import assert_as_mirrored, fake_tpu, here, own, rows_of, seen
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.testing.fake_tpu import FakeSpmdRuntime, runtime_of
from torchstrat.tpu import DeviceAssignment, Topology

SUM, MEAN = ts.VariableAggregation.SUM, ts.VariableAggregation.MEAN
FIRST, NONE = ts.VariableAggregation.ONLY_FIRST_REPLICA, ts.VariableAggregation.NONE
ON_READ = ts.VariableSynchronization.ON_READ
RULES = {"0.weight": ("d0", None), "0.bias": ("d0",), "2.weight": (None, "d0")}
BY_ROWS, BY_COLUMNS, WHOLE = (("d0",), ()), ((), ("d0",)), ((),)


def spec(strategy: ts.TPUStrategy, tensor: torch.Tensor) -> Any:
    found = runtime_of(strategy).annotation(tensor)
    return None if found is None else found.spec


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


# -- how they are cut -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_rules", [True, False])
def test_parameters_are_cut_for_good_and_optimizer_state_follows(by_rules: bool) -> None:
    with fake_tpu(2, 2, sharding_rules=RULES if by_rules else None) as strategy:
        with strategy.scope():
            model = block()
            if not by_rules:
                for index, dims in (("0.weight", [2, 1]), ("0.bias", [2]), ("2.weight", [1, 2])):
                    parameter = model.get_parameter(index)
                    assert strategy.split_to_logical_devices(parameter, dims) is parameter
                assert strategy.replicate_to_logical_devices(model[2].bias) is model[2].bias
            optimizer = torch.optim.Adam(model.parameters())

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        expected = {"0.weight": BY_ROWS, "0.bias": (("d0",),), "2.weight": BY_COLUMNS if by_rules else ((), ("d1",))}
        for _ in range(2):
            strategy.run(step, args=(own(torch.randn(4, 4), torch.randn(4, 4)),))
            for name, parameter in model.named_parameters():
                for one in (parameter, *(optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))):
                    assert spec(strategy, one) == expected.get(name, WHOLE)
            assert spec(strategy, model[1].running_mean) == WHOLE
        # The last word counts, and an annotation counts more than a rule.
        strategy.split_to_logical_devices(model[0].weight, [1, 2])
        assert spec(strategy, model[0].weight) == ((), ("d1",))


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


def test_names_are_those_of_the_outermost_module_and_annotations_in_the_scope_count_more() -> None:
    rules = {"inner.0.weight": ("d0", None), "inner.2.weight": ("d0", None)}
    with fake_tpu(1, 2, sharding_rules=rules) as strategy:
        with strategy.scope():
            model = nn.ModuleDict({"inner": block()})
            strategy.split_to_logical_devices(model["inner"][0].weight, [1, 2])
        assert spec(strategy, model["inner"][0].weight) == ((), ("d1",))
        assert spec(strategy, model["inner"][2].weight) == BY_ROWS


def test_rules_that_do_not_fit() -> None:
    """One that decides nothing is an error at the first run, one that does not divide where the scope closes."""
    with fake_tpu(2, 2, sharding_rules={"0.wieght": ("d0", None), "2.weight": (None, "d0")}) as strategy:
        with strategy.scope():
            model = block()
        with pytest.raises(InvalidArgumentError, match=r"(?s)decide no parameter.*'0\.wieght'.*0\.weight"):
            strategy.run(model, args=(own(torch.ones(2, 4), torch.ones(2, 4)),))
    with fake_tpu(1, 3, sharding_rules={"0.weight": ("d0", None)}) as strategy:
        with pytest.raises(InvalidArgumentError, match=r"'0\.weight' cuts dimension 0 .* does not divide by 3"):
            with strategy.scope():
                model = block()
        assert spec(strategy, model[0].weight) is None


def test_what_is_known_of_variables_keeps_none_alive() -> None:
    with fake_tpu(1, 2, sharding_rules={"0.weight": ("d0", None)}) as strategy:
        with strategy.scope():
            model = block()
        gone = weakref.ref(model[0].weight)
        del model
        gc.collect()
        assert gone() is None


# -- to the devices -------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The devices are torch's meta device: from a CPU to a CPU one cannot see a tensor go."""
    device = torch.device("meta")
    monkeypatch.setattr(FakeSpmdRuntime, "device", device)
    return device


def test_variables_move_as_the_same_objects(elsewhere: torch.device) -> None:
    with fake_tpu(1, 2) as strategy:
        with strategy.scope():
            model = block()
            model[0].bias.requires_grad_(False)
            optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
            weight = model[0].weight
            weight.grad = torch.ones(8, 4)
            weight.register_hook(lambda gradient: gradient)
            weight.register_post_accumulate_grad_hook(lambda _: None)
            hooks, accumulated = weight._backward_hooks, weight._post_accumulate_grad_hooks
            strategy.split_to_logical_devices(model[2].weight, [1, 2])
            assert spec(strategy, model[2].weight) is None  # not before it is there
        assert model[0].weight is weight
        for tensor in (*model.parameters(), *model.buffers()):
            assert tensor.device == elsewhere
            assert spec(strategy, tensor) == (((), ("d1",)) if tensor is model[2].weight else ((),) * tensor.ndim)
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad
        assert not model[0].bias.requires_grad
        assert weight.grad is not None
        assert weight.grad.device == elsewhere
        assert (weight._backward_hooks, weight._post_accumulate_grad_hooks) == (hooks, accumulated)
        assert optimizer.param_groups[0]["params"][0] is weight
        assert optimizer.state[weight]["sum"].device == elsewhere
        assert optimizer.state[weight]["step"].device.type == "cpu"


def with_sparse_buffer() -> nn.Module:
    module = nn.Module()
    module.register_buffer("table", torch.eye(2).to_sparse())
    return module


def test_what_cannot_live_there_is_refused(elsewhere: torch.device) -> None:
    holder = nn.Module()
    says = r"layout torch\.sparse_coo and shape \(2, 2\).*use a dense one"
    with fake_tpu(1, 2) as strategy, pytest.raises(UnsupportedError, match=says), strategy.scope():
        holder.add_module("child", with_sparse_buffer())


# -- ts.Variable ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
@pytest.mark.parametrize("edit", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("counts", [(2, 2), (3, 1)])
def test_assignments_in_a_step(aggregation: ts.VariableAggregation, edit: str, counts: tuple[int, int]) -> None:
    def program(strategy: ts.Strategy) -> Any:
        with strategy.scope():
            v = ts.Variable([1.0, 2.0], dtype=torch.float64, aggregation=aggregation)

        def step(x: torch.Tensor) -> torch.Tensor:
            getattr(v, edit)(x.mean(dim=0)[:2])
            return v * 2

        found = [strategy.run(step, args=(rows_of(counts, seed=seed),)) for seed in range(2)]
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


def test_assignments_outside_of_a_step_and_variables_that_are_added_up_when_read() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            v = ts.Variable(1.0, aggregation=MEAN)
            total = ts.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        v.assign(3.0)
        v.assign_add(1.0)
        assert float(v) == 4.0
        assert len(strategy.local_results(v)) == 1
        assert seen(strategy.run(lambda: v + torch.as_tensor(here().replica_id_in_sync_group))) == [4.0, 5.0]
        for _ in range(2):
            strategy.run(lambda x: total.assign_add(x), args=(own(1.0, 2.0),))
        assert float(total) == 6.0


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.layer(x)


def test_copies_for_a_failed_run_are_gone_when_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is alive then is one of its results. Not even the collector of cycles has to have been there."""

    def existing() -> int:
        return sum(type(one) is torch.Tensor and one.shape == (13,) for one in gc.get_objects())

    alive: list[int] = []
    execute = FakeSpmdRuntime.execute

    def executing(self: Any, **options: Any) -> None:
        alive.append(existing() - before)
        execute(self, **options)

    monkeypatch.setattr(FakeSpmdRuntime, "execute", executing)
    with fake_tpu(2) as strategy:
        gc.collect()
        before = existing()  # of other tests
        with strategy.scope():
            model = Counting()
        gc.disable()
        try:
            for _ in range(3):
                strategy.run(lambda x: model(x).sum().backward(), args=(own(torch.ones(2, 2), torch.ones(2, 2)),))
        finally:
            gc.enable()
        assert set(alive) == {1}


# == annotations =====================================================================================================


@pytest.fixture
def strategy() -> Iterator[ts.TPUStrategy]:
    with fake_tpu(2, 4) as made:
        yield made


@pytest.fixture
def annotated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """(shape, spec) of whatever is annotated; with "placed" before them, of whatever is placed."""
    found: list[tuple[Any, Any]] = []
    annotate, place = FakeSpmdRuntime.annotate, FakeSpmdRuntime.place

    def annotating(self: Any, tensor: torch.Tensor, sharding: Any, grid: Any) -> None:
        annotate(self, tensor, sharding, grid)
        found.append((tuple(tensor.shape), sharding.spec))

    def placing(self: Any, parts: Any, sharding: Any, grid: Any) -> torch.Tensor:
        stacked = place(self, parts, sharding, grid)
        found.append(("placed", *found.pop()))
        return stacked

    monkeypatch.setattr(FakeSpmdRuntime, "annotate", annotating)
    monkeypatch.setattr(FakeSpmdRuntime, "place", placing)
    return found


def test_inputs_that_a_step_cuts_come_cut(strategy: ts.TPUStrategy, annotated: list[Any]) -> None:
    """From the second run on, and whatever the number of rows, if that divides; the step's own tensors are not."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = strategy.split_to_logical_devices(x, [1, 4])
        return (x * strategy.split_to_logical_devices(y + 1, [1, 4])).sum()

    for rows in (2, 2, 3):
        x = ts.PerReplica([torch.ones(rows, 4) for _ in range(2)])
        strategy.run(step, args=(x, torch.ones(rows, 4)))
    whole, cut = (("replica",), (), ()), (("replica",), (), ("d1",))
    placed = [one[1:] for one in annotated if one[0] == "placed"]
    assert [spec for shape, spec in placed if shape == (2, 2, 4)] == [whole, cut]
    assert [spec for shape, spec in placed if shape == (2, 3, 4)] == [cut]


def test_in_a_step_a_tensor_is_one_replicas_and_gradients_are_cut_likewise(
    strategy: ts.TPUStrategy, annotated: list[Any]
) -> None:
    with strategy.scope():
        layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = strategy.split_to_logical_devices(layer(x), [2, 2])
        hidden.square().mean().backward()
        return strategy.split_to_logical_devices(x, [1, 4]) * 2

    result = strategy.run(step, args=(own(torch.ones(2, 4), torch.ones(2, 4)),))
    assert annotated.count(((2, 2, 4), (("replica",), ("d0",), ("d1",)))) == 2  # forward and backward
    assert ((2, 2, 4), (("replica",), (), ("d1",))) in annotated
    assert seen(result) == [[[2.0] * 4] * 2] * 2
    plain = torch.autograd.grad(layer(torch.ones(2, 4)).square().mean(), layer.weight)[0]
    torch.testing.assert_close(layer.weight.grad, plain)


def test_chains(strategy: ts.TPUStrategy, annotated: list[Any]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        first = strategy.split_to_logical_devices(x, [4, 1])
        second = strategy.split_to_logical_devices(first, [1, 4])
        third = strategy.replicate_to_logical_devices(second)
        return strategy.split_to_logical_devices(third + 1, (2, 2))

    result = strategy.run(step, args=(own(torch.ones(4, 4), torch.zeros(4, 4)),))
    specs = [one[1][1:] for one in annotated if one[0] == (2, 4, 4)]
    expected = [(("d0",), ()), ((), ("d1",)), ((), ()), (("d0",), ("d1",))]
    assert [one for one in specs if one in expected][-4:] == expected
    assert [float(one.sum()) for one in result.values] == [32.0, 16.0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_plain_tensors_in_a_step(replicas: int, annotated: list[Any]) -> None:
    """With one replica a batch is a plain tensor, too."""
    shared = torch.ones(2, 4)
    with fake_tpu(replicas, 2) as strategy:
        with strategy.scope():
            layer = nn.Linear(4, 2)

        def step(x: torch.Tensor) -> Any:
            x = strategy.split_to_logical_devices(x, [1, 2])
            out = strategy.split_to_logical_devices(layer(x), [2, 1])
            made = strategy.replicate_to_logical_devices(torch.ones(3) * 2)
            (out.sum() + made.sum()).backward()
            return out.detach(), made

        annotated.clear()
        out, made = strategy.run(step, args=(shared,))
        assert len(annotated) >= 3
        for one in strategy.local_results(out):
            torch.testing.assert_close(one, layer(shared).detach())
        assert [one.tolist() for one in strategy.local_results(made)] == [[2, 2, 2]] * replicas
        torch.testing.assert_close(layer.weight.grad, torch.full((2, 4), 2.0))


def test_outside_of_a_step(strategy: ts.TPUStrategy) -> None:
    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    cut = strategy.split_to_logical_devices(x, [4, 1])
    assert torch.equal(cut, x)
    assert cut.dtype == x.dtype
    cut.square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    assert torch.equal(strategy.replicate_to_logical_devices(np.ones(3)), torch.ones(3, dtype=torch.float64))


def test_annotations_that_do_not_fit(strategy: ts.TPUStrategy) -> None:
    """`test_logical_devices` has all that is checked."""
    for shape, dims, message in (
        ((2, 4), [4], "entries and dimensions differ, 1 and 2"),
        ((3, 4), [2, 2], "dimension 0 has size 3, which does not divide into 2"),
        ((4, 4), [2, 1], "makes 2 parts, and a replica has 4 logical devices"),
    ):
        split = lambda x: strategy.split_to_logical_devices(x, dims)  # noqa: B023, E731
        with pytest.raises(InvalidArgumentError, match=message):
            split(torch.ones(shape))
        with pytest.raises(InvalidArgumentError, match=message):
            strategy.run(split, args=(own(torch.ones(shape), torch.ones(shape)),))
    for call in (strategy.replicate_to_logical_devices, lambda x: strategy.assign_to_logical_device(x, 0)):
        with pytest.raises(WrongTypeError, match="need a tensor; got list"):
            call([1.0, 2.0])
    with pytest.raises(TypeError):
        strategy.split_to_logical_devices([1.0, 2.0], [4])
    with pytest.raises(UnsupportedError, match=r"a logical device annotation was called inside a transform"):
        strategy.run(torch.func.vmap(lambda row: strategy.split_to_logical_devices(row, [4])), args=(torch.ones(2, 4),))


def test_logical_devices_that_do_not_divide_the_devices() -> None:
    """A program runs on all of them."""
    assignment = DeviceAssignment(Topology.virtual([2, 2, 1, 2]), [[[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]])
    with pytest.raises(InvalidArgumentError, match="3 logical devices does not divide the 8 devices"):
        ts.TPUStrategy(device_assignment=assignment, _runtime=FakeSpmdRuntime(8, [2, 2, 1, 2]))


def test_assigning_warns_once(strategy: ts.TPUStrategy) -> None:
    x = torch.ones(2)
    with pytest.warns(UserWarning, match="cannot keep a tensor to one of them; its values are right") as caught:
        assert strategy.assign_to_logical_device(x, 3) is x
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = strategy.run(lambda y: strategy.assign_to_logical_device(y, 1) + 1, args=(own(1.0, 2.0),))
    assert seen(result) == [2, 3]
    with pytest.raises(InvalidArgumentError, match="ids are 0 to 3"):
        strategy.assign_to_logical_device(x, 4)


# -- explain_sharding -----------------------------------------------------------------------------------------------


def test_explaining_a_model(strategy: ts.TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(4, 8)
        strategy.split_to_logical_devices(model.weight, [4, 1])
        assert ts.explain_sharding(model).layouts["weight"].parts == (4, 1)
    with strategy.scope():
        text = str(ts.explain_sharding(model))
    assert text == str(ts.explain_sharding(model, strategy=strategy))
    assert text.startswith("2 replicas × 4 logical devices\n")
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line and line[0] in "wb"}
    assert lines["weight"] == "weight float32 (8, 4) (d0, –) (2, 4) 4 2 32 B"
    assert lines["bias"].startswith("bias float32 (8,) whole (8,) 1 8 32 B")
    assert "weight: (8, 4) cut (d0, –), d0 = 4" in text


def test_explaining_a_model_in_its_scope() -> None:
    with fake_tpu(1, 2, sharding_rules={"bias": ("d0",)}) as strategy, strategy.scope():
        model = nn.Linear(4, 8)
        strategy.split_to_logical_devices(model.weight, [2, 1])
        layouts = ts.explain_sharding(model).layouts
    assert {name: layout.parts for name, layout in layouts.items()} == {"weight": (2, 1), "bias": (2,)}


def test_explaining_tensors(strategy: ts.TPUStrategy) -> None:
    cut = strategy.split_to_logical_devices(torch.ones(4, 4), [2, 2])
    whole = strategy.replicate_to_logical_devices(torch.ones(3))
    explanation = ts.explain_sharding({"cut": cut, "whole": whole}, strategy=strategy)
    assert explanation.layouts["cut"].parts == (2, 2)
    assert explanation.layouts["whole"].copies == 8
    assert (explanation.total_bytes, explanation.bytes_per_device) == (76, 28)
    assert "tensor: (4, 4) cut (d0, d1)" in str(ts.explain_sharding(cut, strategy=strategy))
    texts: list[str] = []

    def step(x: torch.Tensor) -> None:
        texts.append(str(ts.explain_sharding(strategy.split_to_logical_devices(x, [4]), strategy=strategy)))

    strategy.run(step, args=(own(torch.ones(4), torch.ones(4)),))
    assert "tensor: (2, 4) cut (replica, d0)" in texts[0]
    assert "replica 1, logical 3" in texts[0]
    with pytest.raises(InvalidArgumentError, match=r"nobody has said how tensor, of shape \(3,\), is cut"):
        ts.explain_sharding(torch.ones(3), strategy=strategy)
    with pytest.raises(WrongTypeError, match="needs a tensor, a module or a dict of tensors; got int"):
        ts.explain_sharding(3, strategy=strategy)  # type: ignore[arg-type]
