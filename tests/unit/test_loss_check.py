"""Losses whose averaged gradients are not those of one device: one warning, at the first step, and none for others."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrat as ts

pytestmark = pytest.mark.unit
CLASSES = 5
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def warned(loss_of: Loss, shape: tuple[int, ...] = (8,), central: bool = False, **options: str) -> list[str]:
    backward = torch.autograd.backward
    make = ts.CentralStorageStrategy if central else ts.MirroredStrategy
    strategy = make(["cpu:0", "cpu:1"], **options)  # type: ignore[arg-type]
    with strategy.scope():
        model = nn.Linear(3, CLASSES)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        loss_of(model(x), y).backward()

    draw = torch.Generator().manual_seed(0)
    batch = torch.randn(*shape, 3, generator=draw), torch.randint(1, CLASSES, shape, generator=draw)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(lambda: None)
        for part in strategy.distribute_dataset([batch, batch]):
            strategy.run(step, args=part)
            assert torch.autograd.backward is backward
    strategy.close()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def _one_ignored(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y.view(-1)[0] = -100
    return y


def _last_ignored(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[:, -1] = -100
    return y


def _total(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, y, reduction="sum")


def _masked(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.view(-1, CLASSES), y.view(-1))


def _weighed(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y = _one_ignored(y)
    ts.get_replica_context().set_weight(float((y != -100).sum()))  # type: ignore[union-attr]
    return F.cross_entropy(scores, y)


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize(
    "loss_of",
    [
        _total,
        lambda scores, y: F.mse_loss(scores, torch.zeros_like(scores), reduction="sum") + scores.square().sum(),
        lambda scores, y: F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores), reduction="sum"),
    ],
)
def test_sums_are_told(loss_of: Loss, central: bool) -> None:
    [message] = warned(loss_of, central=central)
    assert "the sum of a loss over its rows" in message
    assert "gradient_reduce_op='sum'" in message
    assert "ts.global_mean" in message


@pytest.mark.parametrize(
    ("loss_of", "shape"),
    [
        (lambda scores, y: F.cross_entropy(scores, _one_ignored(y)), (8,)),
        (lambda scores, y: F.cross_entropy(scores, y, ignore_index=int(y[0])), (8,)),
        (lambda scores, y: F.cross_entropy(scores, _one_ignored(y), label_smoothing=0.1) / 4, (8,)),
        (lambda scores, y: scores.square().mean() + F.nll_loss(scores.log_softmax(1), _one_ignored(y)), (8,)),
        (lambda scores, y: _masked(scores, _one_ignored(_last_ignored(y))), (8, 4)),
        (lambda scores, y: F.cross_entropy(scores.transpose(1, 2), _one_ignored(y)), (8, 4)),
    ],
)
def test_ignored_labels_are_told(loss_of: Loss, shape: tuple[int, ...]) -> None:
    [message] = warned(loss_of, shape)
    assert "some are ignored" in message
    assert "ts.global_mean" in message
    assert "set_weight" in message


@pytest.mark.parametrize(
    ("loss_of", "shape"),
    [
        (F.cross_entropy, (8,)),
        (lambda scores, y: F.cross_entropy(scores, y, ignore_index=0), (8,)),
        (lambda scores, y: _masked(scores, _last_ignored(y)), (8, 4)),  # each row has as many
        (lambda scores, y: _total(scores, y) / len(y), (8,)),
        (lambda scores, y: ts.global_mean(_total(scores, y), len(y)), (8,)),
        (lambda scores, y: ts.global_mean(_total(scores, _one_ignored(y)), (y != -100).sum()), (8,)),
        (_weighed, (8,)),
    ],
)
def test_nothing_is_told_of_others(loss_of: Loss, shape: tuple[int, ...]) -> None:
    assert warned(loss_of, shape) == []


def test_a_strategy_that_adds_gradients_up_takes_sums() -> None:
    assert warned(_total, gradient_reduce_op="sum") == []


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    backward, strategy = torch.autograd.backward, ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(KeyError):
        strategy.run({}.__getitem__, args=("x",))
    assert torch.autograd.backward is backward
    strategy.close()


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_gradients_by_frequency_are_told(by_frequency: bool, central: bool, op: str) -> None:
    make = ts.CentralStorageStrategy if central else ts.MirroredStrategy
    strategy = make(["cpu:0", "cpu:1"], gradient_reduce_op=op)
    with strategy.scope():
        table = nn.Embedding(CLASSES, 3, scale_grad_by_freq=by_frequency)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            strategy.run(lambda: table(torch.tensor([1, 1, 2])).square().mean().backward())
    strategy.close()
    messages = [str(one.message) for one in caught]
    assert [message for message in messages if "scale_grad_by_freq=True divides" in message] == messages
    assert len(messages) == int(by_frequency)
