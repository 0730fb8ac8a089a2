"""Losses scaled by the global batch: summed over replicas they are the mean over all examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchstrat as ts


@pytest.fixture
def summing() -> Iterator[ts.Strategy]:
    made = ts.MirroredStrategy(["cpu:0", "cpu:1"], gradient_reduce_op="sum")
    yield made
    made.close()


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (8, 0)])
def test_shares_add_up_to_the_mean_over_the_global_batch(summing: ts.Strategy, sizes: tuple[int, int]) -> None:
    losses = torch.linspace(0, 7, 8)
    parts = ts.PerReplica(list(losses.split(list(sizes))))
    shares = summing.run(lambda part: ts.compute_average_loss(part, global_batch_size=8), args=(parts,))
    assert summing.reduce("sum", shares) == losses.mean()
    shares = summing.run(lambda: ts.scale_regularization_loss(torch.tensor([1.0, 3.0])))
    assert summing.reduce("sum", shares) == 4, "regularization counts once"


def test_the_global_batch_defaults_to_equal_replicas(summing: ts.Strategy) -> None:
    parts = ts.PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    shares = summing.run(ts.compute_average_loss, args=(parts,))
    assert [float(one) for one in shares.values] == [0.75, 2.25]


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], {"sample_weight": torch.tensor([1.0, 10.0]), "global_batch_size": 2}, 36.5),
        ([[1.0, 2.0], [3.0, 4.0]], {"sample_weight": 2.0}, 10.0),
        ([1.0, 2.0, 3.0], {"sample_weight": torch.tensor([[1.0], [0.0], [1.0]]), "global_batch_size": 4}, 1.0),
        ([], {"global_batch_size": 0}, 0.0),
        ([1.0, 1.0], {"global_batch_size": torch.tensor(4)}, 0.5),
    ],
    ids=[
        "weights broadcast from the left",
        "one weight",
        "a column of weights",
        "an empty global batch",
        "a size as a tensor",
    ],
)
def test_outside_of_any_strategy(losses: Any, options: Any, expected: float) -> None:
    assert ts.compute_average_loss(torch.tensor(losses), **options) == expected
    assert ts.scale_regularization_loss([1.0, 3.0]) == 4


CALLS = [lambda: ts.compute_average_loss(torch.ones(2), global_batch_size=4), lambda: ts.scale_regularization_loss(1.0)]


@pytest.mark.parametrize("call", CALLS)
def test_where_they_are_an_error(summing: ts.Strategy, call: Any) -> None:
    with summing.scope(), pytest.raises(RuntimeError, match=r"in the step given to strategy\.run"):
        call()
    averaging = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="gradient_reduce_op='sum'"):
        averaging.run(call)
    averaging.close()
    assert ts.OneDeviceStrategy("cpu:0").run(call) in (0.5, 1.0)  # with one replica mean and sum are the same


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (True, ValueError), (2.0, TypeError), ("2", TypeError)])
def test_sizes_that_are_none(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="global_batch_size must be"):
        ts.compute_average_loss(torch.ones(2), global_batch_size=size)


LOSSES = torch.ones(3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ts.compute_average_loss(LOSSES, torch.ones(2)), r"\(2,\) does not fit losses of shape \(3,\)"),
        (lambda: ts.compute_average_loss(LOSSES, torch.ones(1, 3)), r"\(1, 3\) does not fit"),
        (
            lambda: ts.compute_average_loss(LOSSES[:, None], torch.ones(3, 2)),
            r"give one weight for each row, shape \(3,",
        ),
        (lambda: ts.compute_average_loss(3.0), "a tensor of losses.*got float 3.0"),  # type: ignore[arg-type]
        (lambda: ts.global_mean(3.0, 2), "a tensor; got float 3.0"),  # type: ignore[arg-type]
        (lambda: ts.global_mean(LOSSES[:, None], LOSSES), r"total of shape \(3, 1\) by one number"),
        (lambda: ts.global_mean(LOSSES.sum(), LOSSES), r"total of shape \(\) by one number.*\(3,\).*count.sum\(\)"),
    ],
)
def test_losses_weights_and_counts_that_do_not_fit(call: Any, said: str) -> None:
    with pytest.raises(ts.errors.TorchstratError, match=said):
        call()
