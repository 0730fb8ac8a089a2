"""A strategy of your own, in one file, with a name like the others have.

    python scripts/examples/own_strategy.py

`MicroBatches` computes each global batch in parts, one after the other, as several replicas would. The last line says
that training under it gives the loss of one device.
"""

from typing import final

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts


@final
class MicroBatches(ts.Strategy):
    """``parts`` replicas on the CPU, which take turns.

    `ts.policy.place` sets the replicas up. The policy says what becomes of the steps that they make: here gradients are
    combined; `ts.policy.LocalUpdate` is for replicas that step variables of their own.
    """

    def __init__(self, parts: int = 4) -> None:
        ts.policy.place(self, ts.policy.ReplicatedUpdate(), [f"cpu:{part}" for part in range(parts)])


ts.registry.register("micro_batches", MicroBatches)


def trained(strategy):
    """The loss after training under ``strategy``. The program knows nothing of which one it is."""
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def train_step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(1_024, 8, generator=torch.Generator().manual_seed(0))
    batches = strategy.distribute_dataset(DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=30))
    for _ in range(2):
        for batch in batches:
            losses = strategy.run(train_step, args=(batch,))
    loss = float(strategy.reduce("mean", losses, weighted=True))
    strategy.close()
    return loss


for name in ts.registry.names():
    print("there is", name)
own, one_device = (trained(ts.registry.create(name)) for name in ("micro_batches", "one_device"))
print(f"micro_batches: loss {own:.4f}, one_device: loss {one_device:.4f}")
