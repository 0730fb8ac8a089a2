"""Losses scaled by the global batch: summed over replicas they are the mean over all examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchstrat as ts


def two(op: str) -> ts.Strategy:
    return ts.MirroredStrategy(["cpu:0", "cpu:1"], gradient_reduce_op=op)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (8, 0)])
def test_shares_add_up_to_the_mean_over_the_global_batch(sizes: tuple[int, int]) -> None:
    strategy, losses = two("sum"), torch.linspace(0, 7, 8)
    parts = ts.PerReplica(list(losses.split(list(sizes))))
    shares = strategy.run(lambda part: ts.compute_average_loss(part, global_batch_size=8), args=(parts,))
    assert strategy.reduce("sum", shares) == losses.mean()
    strategy.close()


def test_the_global_batch_defaults_to_equal_replicas() -> None:
    strategy = two("sum")
    parts = ts.PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    shares = strategy.run(ts.compute_average_loss, args=(parts,))
    assert [float(one) for one in shares.values] == [0.75, 2.25]
    strategy.close()


def test_sample_weights_broadcast_from_the_left() -> None:
    losses = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weighted = ts.compute_average_loss(losses, sample_weight=torch.tensor([1.0, 10.0]), global_batch_size=2)
    assert weighted == (1 + 2 + 30 + 40) / 2
    assert ts.compute_average_loss(losses, sample_weight=2.0) == 10.0  # type: ignore[arg-type]


def test_gradients_equal_one_device() -> None:
    strategy, x = two("sum"), torch.arange(6.0)
    with strategy.scope():
        weight = torch.nn.Parameter(torch.tensor(2.0))
        optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = ts.compute_average_loss((weight * x).square(), global_batch_size=6)
        (loss + ts.scale_regularization_loss(weight.square())).backward()
        optimizer.step()

    strategy.run(step, args=(ts.PerReplica(list(x.split([4, 2]))),))
    alone = torch.tensor(2.0, requires_grad=True)
    ((alone * x).square().mean() + alone.square()).backward()
    torch.testing.assert_close(weight.grad, alone.grad)
    strategy.close()


def test_regularization_counts_once() -> None:
    strategy = two("sum")
    shares = strategy.run(lambda: ts.scale_regularization_loss(torch.tensor([1.0, 3.0])))
    assert strategy.reduce("sum", shares) == 4
    assert ts.scale_regularization_loss([1.0, 3.0]) == 4
    strategy.close()


def test_under_averaged_gradients_they_are_an_error() -> None:
    strategy = two("mean")
    for call in (
        lambda: ts.compute_average_loss(torch.ones(2), global_batch_size=4),
        lambda: ts.scale_regularization_loss(torch.ones(2)),
    ):
        with pytest.raises(ValueError, match="gradient_reduce_op='sum'"):
            strategy.run(call)
    strategy.close()
    one = ts.OneDeviceStrategy("cpu:0")  # with one replica mean and sum are the same
    assert one.run(lambda: ts.compute_average_loss(torch.ones(2), global_batch_size=4)) == 0.5


def test_outside_of_a_replica_they_are_an_error() -> None:
    strategy = two("sum")
    with strategy.scope():
        with pytest.raises(RuntimeError, match=r"in the step given to strategy\.run"):
            ts.compute_average_loss(torch.ones(2))
        with pytest.raises(RuntimeError, match=r"in the step given to strategy\.run"):
            ts.scale_regularization_loss(1.0)
    strategy.close()


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (True, ValueError), (2.0, TypeError), ("2", TypeError)])
def test_sizes_that_are_none(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="global_batch_size must be"):
        ts.compute_average_loss(torch.ones(2), global_batch_size=size)


def test_an_empty_global_batch_and_sizes_as_tensors() -> None:
    assert ts.compute_average_loss(torch.ones(0), global_batch_size=0) == 0
    assert ts.compute_average_loss(torch.ones(2), global_batch_size=torch.tensor(4)) == 0.5  # type: ignore[arg-type]
