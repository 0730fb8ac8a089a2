"""Edits in place within a step of `TPUStrategy`, and random numbers that a step draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import assert_as_mirrored, fake_tpu, here, own
from torchstrat.errors import UnsupportedError

# -- edits in place -------------------------------------------------------------------------------------------------


def test_a_variable_takes_what_the_first_replica_makes_of_it() -> None:
    def step(x: torch.Tensor) -> None:
        with torch.no_grad():
            weight.add_(x)
            weight.data.mul_(2)
            weight[0] = x[0] * 10

    with fake_tpu(2) as strategy:
        with strategy.scope():
            holder = nn.ParameterList([torch.zeros(2)])
        weight = holder[0]
        with pytest.warns(UserWarning, match="the replicas have changed ParameterList.0"):
            strategy.run(step, args=(own([1.0, 2.0], [5.0, 6.0]),))
        assert weight.tolist() == [10.0, 4.0]


def test_a_buffer_takes_the_mean() -> None:
    def step(x: torch.Tensor) -> None:
        layer.floating.mul_(0.5).add_(x)
        layer.counts.add_(x.long())

    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(1, 1)
            layer.register_buffer("floating", torch.tensor(2.0))
            layer.register_buffer("counts", torch.tensor(10))
        with pytest.warns(UserWarning, match="buffer '(floating|counts)' of Linear differs") as said:
            strategy.run(step, args=(own(1.0, 4.0),))
        assert len(said) == 2
        assert float(layer.floating) == 3.5
        assert int(layer.counts) == 11  # integers have no mean: the first replica's


def test_gradients_that_a_step_writes_are_combined() -> None:
    def step(x: torch.Tensor) -> None:
        if weight.grad is None:
            weight.grad = x * 1
        else:
            weight.grad.copy_(x * 1)

    with fake_tpu(2) as strategy:
        with strategy.scope():
            holder = nn.ParameterList([torch.zeros(2)])
        weight = holder[0]
        for _ in range(2):
            strategy.run(step, args=(own([1.0, 2.0], [5.0, 6.0]),))
            assert weight.grad is not None
            assert weight.grad.tolist() == [3.0, 4.0]


def test_totals_become_the_replicas_own() -> None:
    def step(x: torch.Tensor) -> Any:
        total, count, product, quotient = torch.zeros(()), torch.zeros(()), torch.ones(()), torch.ones(())
        for row in x:
            total += row
            count -= 1
            product *= row
            quotient /= row
        return total, count, product, quotient

    with fake_tpu(2) as strategy:
        total, count, product, quotient = strategy.run(step, args=(own([1.0, 2.0], [4.0, 5.0]),))
        assert [float(one) for one in total.values] == [3.0, 9.0]
        assert [float(one) for one in count.values] == [-2.0, -2.0]
        assert [float(one) for one in product.values] == [2.0, 20.0]
        assert [float(one) for one in quotient.values] == [0.5, 0.05000000074505806]


def test_tensors_that_the_step_made_become_the_replicas_own() -> None:
    def step(x: torch.Tensor) -> Any:
        total = torch.zeros(2)
        alias = total
        total.add_(x)
        buffer = torch.zeros(3, 2)
        buffer[1] = x
        buffer[2, 0] += x[1]
        return alias, buffer

    with fake_tpu(2) as strategy:
        alias, buffer = strategy.run(step, args=(own([1.0, 2.0], [5.0, 6.0]),))
    assert [one.tolist() for one in alias.values] == [[1, 2], [5, 6]]
    assert [one.tolist() for one in buffer.values] == [[[0, 0], [1, 2], [2, 0]], [[0, 0], [5, 6], [6, 0]]]


@pytest.mark.parametrize(
    "edit",
    [
        lambda shared, x: shared.add_(x),
        lambda shared, x: shared.copy_(x),
        lambda shared, x: shared.__setitem__(0, x[0]),
        lambda shared, x: shared.scatter_add_(0, torch.zeros(2, dtype=torch.long), x),
    ],
)
def test_edits_of_a_tensor_from_outside_of_the_step_are_refused(edit: Callable[[Any, Any], Any]) -> None:
    shared = torch.zeros(2)
    with fake_tpu(2) as strategy, pytest.raises(UnsupportedError, match="Write it out of place: total = total"):
        strategy.run(lambda x: edit(shared, x), args=(own([1.0, 2.0], [5.0, 6.0]),))
    assert shared.tolist() == [0, 0]


def test_edits_of_a_replicas_own_tensors() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.add_(1).mul_(x)
        y[0] = 7
        y[1] += x[0]
        return y

    assert_as_mirrored(lambda strategy: strategy.run(step, args=(own([1.0, 2.0], [5.0, 6.0]),)))


def test_inputs_are_not_the_users_tensors() -> None:
    first, second = torch.ones(2), torch.ones(2)
    with fake_tpu(2) as strategy:
        strategy.run(lambda x: x.mul_(3), args=(ts.PerReplica([first, second]),))
    assert first.tolist() == second.tolist() == [1, 1]


# -- random numbers -------------------------------------------------------------------------------------------------


def draw() -> Any:
    x = torch.rand(4)
    return x, torch.nn.functional.dropout(torch.ones(64)), torch.randn_like(x), torch.randint(0, 1000, (4,))


def test_replicas_draw_different_numbers_that_can_be_repeated() -> None:
    def runs() -> list[Any]:
        torch.manual_seed(3)
        return [[one.values for one in strategy.run(draw)] for _ in range(2)]

    with fake_tpu(2) as strategy:
        first, again = runs(), runs()
        for mine, other in zip(first, again, strict=True):
            for a, b in zip(mine, other, strict=True):
                assert torch.equal(a[0], b[0])
                assert torch.equal(a[1], b[1])
                assert not torch.equal(a[0], a[1])
        assert not torch.equal(first[0][0][0], first[1][0][0])
        torch.manual_seed(4)
        assert not torch.equal(strategy.run(draw)[0].values[0], first[0][0][0])


def test_drawing_in_a_step_leaves_the_generator_of_the_program_alone() -> None:
    with fake_tpu(2) as strategy:
        torch.manual_seed(3)
        plain = torch.rand(2)
        torch.manual_seed(3)
        strategy.run(draw)
        assert torch.equal(torch.rand(2), plain)


def test_random_first_values_within_a_step_are_one_for_all_replicas() -> None:
    def step() -> None:
        nn.init.normal_(layer.weight)
        with torch.no_grad():
            layer.bias.uniform_(5, 6)

    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.Linear(3, 2)
        before = layer.weight.detach().clone()
        strategy.run(step)
        assert not torch.equal(layer.weight, before)
        assert all(5 <= one <= 6 for one in layer.bias.tolist())
        result = strategy.run(lambda: layer.weight * 1)
        assert torch.equal(*result.values)


def test_a_layer_that_is_made_when_it_is_first_called() -> None:
    with fake_tpu(2) as strategy:
        with strategy.scope():
            layer = nn.LazyLinear(2)
        strategy.run(lambda x: layer(x).sum().backward(), args=(own([[1.0, 2.0]], [[3.0, 4.0]]),))
        assert layer.weight.shape == (2, 2)
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[2, 3], [2, 3]]
        assert strategy.run(lambda: here().num_replicas_in_sync) == 2
