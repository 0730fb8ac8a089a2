"""What a step does with the gradient of a table that is read by rows: the numbers of one device, whatever it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchstrat as ts
from torchstrat.testing.fake_cluster import FakeCluster

pytestmark = [pytest.mark.unit, pytest.mark.deadline(60)]

Parameters = list[nn.Parameter]
NOISE = torch.linspace(-1, 1, 80, dtype=torch.float64).reshape(20, 4)


def add_noise(parameters: Parameters) -> torch.Tensor:
    parameters[0].grad.add_(NOISE)
    return parameters[0].grad.abs().max()


def hold_and_change(parameters: Parameters) -> torch.Tensor:
    """What has another gradient in its place since is changed through the one that was held before."""
    gradients = [parameter.grad for parameter in parameters]
    for gradient in gradients:
        gradient.masked_fill_(gradient.isnan(), 0.0)
        gradient.mul_(0.5)
    torch._foreach_mul_(gradients, 0.5)
    return gradients[0].norm()


def without(parameters: Parameters) -> torch.Tensor:
    return parameters[0].grad.sum()


def by_vector(parameters: Parameters) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in parameters]).std()


def clip_norm(norm_type: float) -> Callable[[Parameters], torch.Tensor]:
    return lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1, norm_type)


def clip_value(parameters: Parameters) -> torch.Tensor:
    torch.nn.utils.clip_grad_value_(parameters, 0.05)
    return parameters[0].grad.sum()


def clamp_away_from_zero(parameters: Parameters) -> torch.Tensor:
    parameters[0].grad.clamp_(min=0.01)
    return parameters[0].grad.sum()


def every_norm(parameters: Parameters) -> torch.Tensor:
    gradient = parameters[0].grad
    norms = [torch.linalg.vector_norm(gradient, order) for order in (0, 0.5, 1, 2, float("inf"), -1, float("-inf"))]
    return torch.stack([*norms, torch.linalg.vector_norm(gradient, dim=1).sum(), *torch._foreach_norm([gradient])])


def through_aliases(parameters: Parameters) -> torch.Tensor:
    for parameter in parameters:
        parameter.grad.data.clamp_(-0.02, 0.03)
        parameter.grad.detach().mul_(0.5)
        parameter.grad.detach().add_(0.01)
    return parameters[0].grad.sum()


def forms(parameters: Parameters) -> torch.Tensor:
    gradient = parameters[0].grad
    seen = [gradient.is_sparse, gradient.layout == torch.sparse_coo, (gradient * 2).is_sparse]
    return torch.tensor([*map(float, seen), *gradient.data.abs().sum()[None].tolist()])


WAYS: dict[str, Callable[[Parameters], torch.Tensor]] = {
    "nothing": without,
    "clip_grad_norm_": clip_norm(2.0),
    "clip_grad_norm_ of inf": clip_norm(float("inf")),
    "clip_grad_norm_ of 1": clip_norm(1.0),
    "clip_grad_value_": clip_value,
    "clamp that does not keep 0": clamp_away_from_zero,
    "norms": every_norm,
    "add_": add_noise,
    "held": hold_and_change,
    "aliases": through_aliases,
    "forms": forms,
    "flattened": by_vector,
    "isfinite": lambda parameters: torch.isfinite(parameters[0].grad).all(),
    "mean": lambda parameters: parameters[0].grad.mean(),
    "rows": lambda parameters: parameters[0].grad[3:7].clone(),
    "numpy": lambda parameters: torch.from_numpy(parameters[0].grad.numpy()).sum(),
}


def build() -> tuple[nn.Embedding, nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    table, head = nn.Embedding(20, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)
    return table, head, torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)


def step_of(table: nn.Embedding, head: nn.Linear, optimizer: torch.optim.Optimizer, way: str, lookups: int):
    def step(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parameters = [*table.parameters(), *head.parameters()]
        optimizer.zero_grad()
        loss = sum(head(table(ids + more)).square().mean() for more in range(lookups))
        loss.backward()
        seen = WAYS[way](parameters)
        optimizer.step()
        return loss.detach(), seen.detach()

    return step


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_one_device(way, lookups):
    batches = [torch.tensor(ids) for ids in ([1, 2, 2], [5, 1, 17], [4, 4, 4])]
    step = step_of(*build(), way, lookups)
    expected = [step(ids) for ids in batches]
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(2))
        coordinator = ts.ClusterCoordinator(strategy)
        with strategy.scope():
            table, head, optimizer = build()
        step = step_of(table, head, optimizer, way, lookups)
        seen = [coordinator.schedule(step, args=(ids,)).get(timeout=60) for ids in batches]
    torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-10)


def test_a_gradient_that_has_become_dense_is_one_of_rows_still():
    """With ``rows_only`` (the default) rows without any gradient do not move, whatever the step asks of the others."""
    with FakeCluster(workers=1, ps=2) as cluster:
        strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(2), rows_only=True)
        coordinator = ts.ClusterCoordinator(strategy)
        with strategy.scope():
            table, head, _ = build()
            optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()], lr=0.1)
        before = table.weight.detach().clone()
        step = step_of(table, head, optimizer, "isfinite", 1)
        for ids in ([1, 2], [3, 4]):
            coordinator.schedule(step, args=(torch.tensor(ids),)).get(timeout=60)
        middle = table.state_dict()["weight"].clone()
        coordinator.schedule(step, args=(torch.tensor([3, 4]),)).get(timeout=60)
        after = table.state_dict()["weight"]
    assert (before != middle).any(1).nonzero().flatten().tolist() == [1, 2, 3, 4]
    assert (middle != after).any(1).nonzero().flatten().tolist() == [3, 4]
