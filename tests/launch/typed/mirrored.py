"""A training program with types, as a user writes it under ``mypy --strict``."""

import torch
from torch import nn
from typing_extensions import assert_type

import torchstrat as ts

Batch = tuple[torch.Tensor, torch.Tensor]

strategy: ts.Strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope() as same:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
assert_type(same, ts.Strategy)


def train_step(batch: Batch) -> torch.Tensor:
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def evaluate(batch: Batch) -> tuple[torch.Tensor, int]:
    x, y = batch
    return nn.functional.mse_loss(model(x), y), len(x)


def measure(batch: Batch) -> dict[str, torch.Tensor]:
    loss, _ = evaluate(batch)
    return {"loss": loss}


def say(batch: Batch) -> None:
    print(len(batch[0]))


data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(data, batch_size=32)):
    losses = strategy.run(train_step, args=(batch,))
    assert_type(losses, ts.PerReplica[torch.Tensor])
    assert_type(strategy.reduce("mean", losses), torch.Tensor)
    assert_type(strategy.local_results(losses), tuple[torch.Tensor, ...])
    loss, rows = strategy.run(evaluate, (batch,))
    assert_type(rows, ts.PerReplica[int])
    assert_type(strategy.reduce("sum", rows), torch.Tensor | int)
    print(float(strategy.reduce(ts.ReduceOp.MEAN, loss, weighted=True)), int(strategy.reduce("sum", rows)))
    measured = strategy.run(measure, (batch,))
    assert_type(measured, dict[str, ts.PerReplica[torch.Tensor]])
    assert_type(strategy.reduce("mean", measured)["loss"], torch.Tensor)
    strategy.run(say, (batch,))


def number(context: ts.ValueContext) -> int:
    return context.replica_id_in_sync_group


assert_type(strategy.distribute_values_from_function(number), ts.PerReplica[int])
assert_type(ts.get_strategy(), ts.Strategy)
replica = ts.get_replica_context()
assert_type(replica, ts.ReplicaContext | None)
if replica is not None:
    assert_type(replica.strategy, ts.Strategy)
strategy.close()
