"""Losses whose averaged gradients are not those of one device: one warning, at the first step, and none for others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrat as ts

pytestmark = pytest.mark.unit
CLASSES = 5
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@contextmanager
def warnings_of(central: bool = False, **options: str) -> Iterator[tuple[ts.Strategy, list[str]]]:
    """A strategy of two replicas, and what is told while it runs; afterwards nothing is left of looking at losses."""
    backward = torch.autograd.backward
    make = ts.CentralStorageStrategy if central else ts.MirroredStrategy
    strategy = make(["cpu:0", "cpu:1"], **options)  # type: ignore[arg-type]
    messages: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield strategy, messages
    finally:
        strategy.close()
        assert torch.autograd.backward is backward
    assert all(one.filename == __file__ for one in caught)
    messages += [str(one.message) for one in caught]


def warned(loss_of: Loss, shape: tuple[int, ...] = (8,), central: bool = False, **options: str) -> list[str]:
    with warnings_of(central, **options) as (strategy, messages):
        with strategy.scope():
            model = nn.Linear(3, CLASSES)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            model.zero_grad()
            loss_of(model(x), y).backward()

        draw = torch.Generator().manual_seed(0)
        batch = torch.randn(*shape, 3, generator=draw), torch.randint(1, CLASSES, shape, generator=draw)
        strategy.run(lambda: None)
        for part in strategy.distribute_dataset([batch, batch]):
            strategy.run(step, args=part)
    return messages


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
    for said in ("the sum of a loss over its rows", "gradient_reduce_op='sum'", "ts.global_mean"):
        assert said in message


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
    for said in ("some are ignored", "ts.global_mean", "set_weight"):
        assert said in message


@pytest.mark.parametrize(
    ("loss_of", "shape", "options"),
    [
        (F.cross_entropy, (8,), {}),
        (lambda scores, y: F.cross_entropy(scores, y, ignore_index=0), (8,), {}),
        (lambda scores, y: _masked(scores, _last_ignored(y)), (8, 4), {}),  # each row has as many
        (lambda scores, y: _total(scores, y) / len(y), (8,), {}),
        (lambda scores, y: ts.global_mean(_total(scores, y), len(y)), (8,), {}),
        (lambda scores, y: ts.global_mean(_total(scores, _one_ignored(y)), (y != -100).sum()), (8,), {}),
        (_weighed, (8,), {}),
        (_total, (8,), {"gradient_reduce_op": "sum"}),  # a strategy that adds gradients up takes sums
    ],
)
def test_nothing_is_told_of_others(loss_of: Loss, shape: tuple[int, ...], options: dict[str, str]) -> None:
    assert warned(loss_of, shape, **options) == []


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    with warnings_of() as (strategy, _), pytest.raises(KeyError):
        strategy.run({}.__getitem__, args=("x",))


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_gradients_by_frequency_are_told(by_frequency: bool, central: bool, op: str) -> None:
    with warnings_of(central, gradient_reduce_op=op) as (strategy, messages):
        with strategy.scope():
            table = nn.Embedding(CLASSES, 3, scale_grad_by_freq=by_frequency)
        for _ in range(2):
            strategy.run(lambda: table(torch.tensor([1, 1, 2])).square().mean().backward())
    assert ["scale_grad_by_freq=True divides" in message for message in messages] == [True] * by_frequency
