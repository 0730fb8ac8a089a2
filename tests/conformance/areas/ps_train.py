"""An embedding table and a dense matrix on servers, trained by one worker: losses, final values and shards.

The recorded loss is ``mean((lookup - target)²) + mean((lookup @ w)²)``. Adam's epsilon stands elsewhere in PyTorch's
formula; with 1e-8 that is below the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.conformance.clusters import cluster_of, coordinated
from tests.conformance.harness import Case, Difference, decode
from torchstrat.partitioners import FixedShardsPartitioner
from torchstrat.testing.fake_cluster import FakeCluster

Lookup = Callable[[nn.Module, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Model(nn.Module):
    def __init__(self, table: torch.Tensor, w: torch.Tensor) -> None:
        super().__init__()
        self.table, self.w = nn.Parameter(table), nn.Parameter(w)


def loss_of(rows: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (rows - target).square().mean() + (rows @ w).square().mean()


def batches(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(map(torch.tensor, case.inputs["ids"]), decode(case.inputs["targets"]), strict=True))


def first_values(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return decode(case.inputs["embedding0"]), torch.tensor(case.inputs["w0"])


def with_optimizer(
    make_optimizer: MakeOptimizer, lookup: Lookup, *, in_run: bool, rows_only: bool = True
) -> Callable[[Case], Any]:
    """A module and an optimizer made in the scope, an ordinary step, through ``strategy.run`` or not.

    ``rows_only=False`` where the recorded optimizer changes every row of the table at every step.
    """

    def operation(case: Case) -> dict[str, Any]:
        cluster = cluster_of(case)
        strategy = cluster.strategy(FixedShardsPartitioner(case.setup["num_shards"]), rows_only=rows_only)
        with strategy.scope():
            model = Model(*first_values(case))
            optimizer = make_optimizer(model.parameters())

        def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(lookup(model, ids), model.w, target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        def worker_step(*batch: torch.Tensor) -> Any:
            return strategy.run(step, args=batch)

        coordinator = ts.ClusterCoordinator(strategy)
        losses = [coordinator.schedule(worker_step if in_run else step, args=batch) for batch in batches(case)]
        coordinator.join()
        values = model.state_dict()
        return {
            "losses": [loss.get().item() for loss in losses],
            "final_embedding": values["table"],
            "final_w": values["w"],
            "rows_per_shard": rows_on_servers(cluster, "table"),
            "w_rows_per_shard": rows_on_servers(cluster, "w"),
        }

    return operation


def adam_by_hand(case: Case) -> dict[str, Any]:
    """Weights and moments are `ts.Variable`, in shards where the partitioner says so; the function has the formula."""
    coordinator = coordinated(case, FixedShardsPartitioner(case.setup["num_shards"]))
    rate, beta1, beta2, epsilon = case.inputs["lr"], 0.9, 0.999, 1e-7
    with coordinator.strategy.scope():
        weights: list[Any] = [ts.Variable(first) for first in first_values(case)]
        means: list[Any] = [ts.Variable(torch.zeros_like(first)) for first in first_values(case)]
        squares: list[Any] = [ts.Variable(torch.zeros_like(first)) for first in first_values(case)]
        steps = ts.Variable(0.0)

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        table, w = (torch.as_tensor(one).clone().requires_grad_() for one in weights)
        loss = loss_of(F.embedding(ids, table), w, target)
        gradients = torch.autograd.grad(loss, [table, w])
        steps.assign_add(1.0)
        t = steps.read_value()
        for weight, mean, square, gradient in zip(weights, means, squares, gradients, strict=True):
            mean.assign(beta1 * torch.as_tensor(mean) + (1 - beta1) * gradient)
            square.assign(beta2 * torch.as_tensor(square) + (1 - beta2) * gradient * gradient)
            corrected = rate * torch.sqrt(1 - beta2**t) / (1 - beta1**t)
            weight.assign_sub(corrected * torch.as_tensor(mean) / (torch.sqrt(torch.as_tensor(square)) + epsilon))
        return loss.detach()

    losses = [coordinator.schedule(step, args=batch) for batch in batches(case)]
    coordinator.join()
    return {
        "losses": [loss.get().item() for loss in losses],
        "final_embedding": torch.as_tensor(weights[0]),
        "final_w": torch.as_tensor(weights[1]),
        "rows_per_shard": rows_per_shard(weights[0]),
        "w_rows_per_shard": rows_per_shard(weights[1]),
    }


def rows_per_shard(variable: ts.Variable | ts.ShardedVariable) -> list[int]:
    shards = variable.variables if isinstance(variable, ts.ShardedVariable) else [variable]
    return [shard.shape[0] for shard in shards]


def rows_on_servers(cluster: FakeCluster, name: str) -> list[int]:
    """The rows of each shard that the servers hold of a parameter, in order."""
    held = {}
    for server in range(cluster.spec.num_tasks("ps")):
        for described in cluster.service("ps", server).store.catalog()["variables"]:
            if described["name"] == f"{name} of module 0":
                held |= {shard: described["shards"][shard] for shard in described["held"]}
    return [stop - start for _, (_, start, stop) in sorted(held.items())]


def by_rows(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Only the rows that the batch names travel; others stay as they are."""
    return F.embedding(ids, model.get_parameter("table"))


def as_a_matrix(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The gradient is dense: every row has one, and the optimizer changes all rows."""
    return model.get_parameter("table")[ids]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1, eps=1e-8)


OPS: dict[str, Callable[[Case], Any]] = {
    "adam_manual": adam_by_hand,
    "adam_v1_in_run": with_optimizer(adam, by_rows, in_run=True, rows_only=False),
    "sgd_dense": with_optimizer(sgd, as_a_matrix, in_run=False),
    "sgd_sparse": with_optimizer(sgd, by_rows, in_run=False),
    "sgd_v1_in_run": with_optimizer(sgd, by_rows, in_run=True),
}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
