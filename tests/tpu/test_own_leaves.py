"""What a step makes and adapts to its replica's rows, on eight virtual devices: the steps of the unit tests. And each
replica's own gradients of variables."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.tpu.models import make_strategy
from tests.unit.test_tpu_own_leaves import LAYER, STEPS, loss_of
from torchstrat.errors import ReplicaDivergenceError

pytestmark = [pytest.mark.tpu, pytest.mark.filterwarnings("ignore:the step uses trainable variables:UserWarning")]

ROWS = torch.rand(8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_what_a_step_makes_is_adapted_to_its_replicas_rows() -> None:
    strategy = make_strategy(4, 2)  # before any backward pass of the process, and before it takes the originals
    wanted = [torch.cat([step(part) for part in ROWS.split(2)]) for step in STEPS]
    try:
        for step, one in zip(STEPS, wanted, strict=True):
            (given,) = strategy.distribute_dataset([ROWS])
            seen = strategy.gather(strategy.run(step, args=(given,)), axis=0)
            torch.testing.assert_close(
                seen.cpu(), one.detach(), rtol=1e-9, atol=1e-9, msg=lambda text, step=step: f"{step.__name__}: {text}"
            )
    finally:
        strategy.close()


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_kept_copy(is_trained: bool) -> None:
    kept: dict[str, Any] = {}
    strategy = make_strategy(4, 2)
    try:
        with strategy.scope():
            model = copy.deepcopy(LAYER)

        def step(x: torch.Tensor) -> torch.Tensor:
            if not kept:
                kept["copy"] = copy.deepcopy(model)
                kept["optimizer"] = torch.optim.SGD(kept["copy"].parameters(), 0.1)
            loss = loss_of(kept["copy"], x)
            if is_trained:
                loss.backward()
                kept["optimizer"].step()
            return loss.detach()

        batches = iter(strategy.distribute_dataset([ROWS] * 2))
        first = strategy.reduce("mean", strategy.run(step, args=(next(batches),)), axis=None)
        if is_trained:
            with pytest.raises(ReplicaDivergenceError, match=r"no variables of the strategy.*strategy\.scope"):
                strategy.run(step, args=(next(batches),))
        else:
            second = strategy.reduce("mean", strategy.run(step, args=(next(batches),)), axis=None)
            assert float(first) == pytest.approx(float(second))
            assert torch.equal(kept["copy"][0].weight.cpu(), model[0].weight.cpu())
    finally:
        strategy.close()


ACTIVATIONS = (F.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, F.hardswish, F.softplus, F.logsigmoid, torch.tanh)


def gradients_through(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """``(activations, parameters)``."""
    losses = [activation(layer(x)).square().mean() for activation in ACTIVATIONS]
    each = [torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True) for loss in losses]
    return torch.stack([torch.cat([one.flatten() for one in own]) for own in each])


def test_each_replicas_gradients_of_variables_through_activations() -> None:
    strategy = make_strategy(4, 2)
    try:
        torch.manual_seed(4)
        plain = nn.Linear(3, 4, dtype=torch.float64)
        with strategy.scope():
            placed = copy.deepcopy(plain)
        (given,) = strategy.distribute_dataset([ROWS - 0.5])
        seen = strategy.run(lambda x: gradients_through(placed, x), args=(given,))
        for own, rows in zip(strategy.local_results(seen), (ROWS - 0.5).split(2), strict=True):
            torch.testing.assert_close(own.cpu(), gradients_through(plain, rows), rtol=1e-12, atol=1e-12)
    finally:
        strategy.close()
