"""The logical device annotations of `TPUStrategy`, in a step and outside, and `explain_sharding` of what they made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import fake_tpu, own
from torchstrat.errors import InvalidArgumentError, UnsupportedError, WrongTypeError
from torchstrat.sharding.grid import Sharding
from torchstrat.testing.fake_spmd import FakeSpmdRuntime


@pytest.fixture
def strategy() -> Iterator[ts.TPUStrategy]:
    with fake_tpu(2, 4) as made:
        yield made


def annotated(strategy: ts.TPUStrategy, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """(shape, spec) of whatever is annotated from now on."""
    found: list[tuple[Any, Any]] = []
    original = FakeSpmdRuntime.annotate

    def annotate(self: Any, tensor: torch.Tensor, sharding: Sharding, grid: Any) -> None:
        original(self, tensor, sharding, grid)
        found.append((tuple(tensor.shape), sharding.spec))

    monkeypatch.setattr(FakeSpmdRuntime, "annotate", annotate)
    return found


def test_inputs_that_a_step_cuts_come_cut(strategy: ts.TPUStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second run on, and whatever the number of rows, if that divides; the step's own tensors are not."""
    placed: list[tuple[Any, Any]] = []
    original = FakeSpmdRuntime.place

    def place(self: Any, parts: Any, sharding: Sharding, grid: Any) -> torch.Tensor:
        stacked = original(self, parts, sharding, grid)
        placed.append((tuple(stacked.shape), sharding.spec))
        return stacked

    monkeypatch.setattr(FakeSpmdRuntime, "place", place)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = strategy.split_to_logical_devices(x, [1, 4])
        return (x * strategy.split_to_logical_devices(y + 1, [1, 4])).sum()

    for rows in (2, 2, 3):
        x, y = (ts.PerReplica([torch.ones(rows, width) for _ in range(2)]) for width in (4, 4))
        strategy.run(step, args=(x, y.values[0]))
    whole, cut = (("replica",), (), ()), (("replica",), (), ("d1",))
    assert [spec for shape, spec in placed if shape == (2, 2, 4)] == [whole, cut]
    assert [spec for shape, spec in placed if shape == (2, 3, 4)] == [cut]


def test_in_a_step_a_tensor_is_one_replicas(strategy: ts.TPUStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    x = own(torch.arange(8.0).reshape(2, 4), torch.ones(2, 4))
    found = annotated(strategy, monkeypatch)
    result = strategy.run(lambda x: strategy.split_to_logical_devices(x, [1, 4]) * 2, args=(x,))
    assert ((2, 2, 4), (("replica",), (), ("d1",))) in found
    assert [one.tolist() for one in result.values] == [(2 * one).tolist() for one in x.values]


def test_gradients_are_cut_likewise(strategy: ts.TPUStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    with strategy.scope():
        layer = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> None:
        hidden = strategy.split_to_logical_devices(layer(x), [2, 2])
        hidden.square().mean().backward()

    found = annotated(strategy, monkeypatch)
    strategy.run(step, args=(own(torch.ones(2, 4), torch.ones(2, 4)),))
    assert found.count(((2, 2, 4), (("replica",), ("d0",), ("d1",)))) == 2  # forward and backward
    plain = torch.autograd.grad(layer(torch.ones(2, 4)).square().mean(), layer.weight)[0]
    torch.testing.assert_close(layer.weight.grad, plain)


def test_chains(strategy: ts.TPUStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        first = strategy.split_to_logical_devices(x, [4, 1])
        second = strategy.split_to_logical_devices(first, [1, 4])
        third = strategy.replicate_to_logical_devices(second)
        return strategy.split_to_logical_devices(third + 1, (2, 2))

    found = annotated(strategy, monkeypatch)
    x = own(torch.ones(4, 4), torch.zeros(4, 4))
    result = strategy.run(step, args=(x,))
    specs = [one[1][1:] for one in found if one[0] == (2, 4, 4)]
    expected = [(("d0",), ()), ((), ("d1",)), ((), ()), (("d0",), ("d1",))]
    assert [one for one in specs if one in expected][-4:] == expected
    assert [float(one.sum()) for one in result.values] == [32.0, 16.0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_plain_tensors_in_a_step(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one replica a batch is a plain tensor, too."""
    with fake_tpu(replicas, 2) as strategy:
        with strategy.scope():
            layer = nn.Linear(4, 2)
        shared = torch.ones(2, 4)

        def step(x: torch.Tensor) -> Any:
            x = strategy.split_to_logical_devices(x, [1, 2])
            out = strategy.split_to_logical_devices(layer(x), [2, 1])
            made = strategy.replicate_to_logical_devices(torch.ones(3) * 2)
            (out.sum() + made.sum()).backward()
            return out.detach(), made

        found = annotated(strategy, monkeypatch)
        out, made = strategy.run(step, args=(shared,))
        assert len(found) >= 3
        for one in strategy.local_results(out):
            torch.testing.assert_close(one, layer(shared).detach())
        for one in strategy.local_results(made):
            assert one.tolist() == [2, 2, 2]
        torch.testing.assert_close(layer.weight.grad, torch.full((2, 4), 2.0))


def test_outside_of_a_step(strategy: ts.TPUStrategy) -> None:
    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    cut = strategy.split_to_logical_devices(x, [4, 1])
    assert torch.equal(cut, x)
    assert cut.dtype == x.dtype
    cut.square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    assert torch.equal(strategy.replicate_to_logical_devices(np.ones(3)), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ((2, 4), [4], "entries and dimensions differ, 1 and 2"),
        ((3, 4), [2, 2], "dimension 0 has size 3, which does not divide into 2"),
        ((4, 4), [2, 1], "makes 2 parts, and a replica has 4 logical devices"),
    ],
)
def test_splits_that_do_not_fit(
    strategy: ts.TPUStrategy, inside: bool, shape: tuple[int, ...], dims: list[int], message: str
) -> None:
    def split(x: torch.Tensor) -> Any:
        return strategy.split_to_logical_devices(x, dims)

    def call() -> None:
        if inside:
            strategy.run(split, args=(own(torch.ones(shape), torch.ones(shape)),))
        else:
            split(torch.ones(shape))

    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_only_tensors_are_annotated(strategy: ts.TPUStrategy) -> None:
    for call in (strategy.replicate_to_logical_devices, lambda x: strategy.assign_to_logical_device(x, 0)):
        with pytest.raises(WrongTypeError, match="need a tensor; got list"):
            call([1.0, 2.0])
    with pytest.raises(TypeError):
        strategy.split_to_logical_devices([1.0, 2.0], [4])


def test_annotations_inside_a_transform(strategy: ts.TPUStrategy) -> None:
    def step(x: torch.Tensor) -> Any:
        return torch.func.vmap(lambda row: strategy.split_to_logical_devices(row, [4]))(x)

    with pytest.raises(UnsupportedError, match=r"a logical device annotation was called inside a transform"):
        strategy.run(step, args=(own(torch.ones(2, 4), torch.ones(2, 4)),))


def test_assigning_warns_once_and_remembers(strategy: ts.TPUStrategy) -> None:
    x = torch.ones(2)
    with pytest.warns(UserWarning, match="cannot keep a tensor to one of them; its values are right") as caught:
        assert strategy.assign_to_logical_device(x, 3) is x
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.assign_to_logical_device(x, 2)
        result = strategy.run(lambda y: strategy.assign_to_logical_device(y, 1) + 1, args=(own(1.0, 2.0),))
    assert [float(one) for one in result.values] == [2, 3]
    assignments = strategy._engine.annotations.assignments
    assert assignments.device_of(x) == 2
    assert assignments.device_of(torch.ones(2)) is None
    with pytest.raises(InvalidArgumentError, match="ids are 0 to 3"):
        strategy.assign_to_logical_device(x, 4)


# -- explain_sharding -----------------------------------------------------------------------------------------------


def test_explaining_a_model(strategy: ts.TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(4, 8)
        strategy.split_to_logical_devices(model.weight, [4, 1])
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
    assert explanation.total_bytes == 76
    assert explanation.bytes_per_device == 28
    assert "tensor: (4, 4) cut (d0, d1)" in str(ts.explain_sharding(cut, strategy=strategy))


def test_explaining_in_a_step(strategy: ts.TPUStrategy) -> None:
    texts: list[str] = []

    def step(x: torch.Tensor) -> None:
        texts.append(str(ts.explain_sharding(strategy.split_to_logical_devices(x, [4]), strategy=strategy)))

    strategy.run(step, args=(own(torch.ones(4), torch.ones(4)),))
    assert "tensor: (2, 4) cut (replica, d0)" in texts[0]
    assert "replica 1, logical 3" in texts[0]


def test_explaining_what_nobody_said_anything_about(strategy: ts.TPUStrategy) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nobody has said how tensor, of shape \(3,\), is cut"):
        ts.explain_sharding(torch.ones(3), strategy=strategy)
    with pytest.raises(WrongTypeError, match="needs a tensor, a module or a dict of tensors; got int"):
        ts.explain_sharding(3, strategy=strategy)  # type: ignore[arg-type]
