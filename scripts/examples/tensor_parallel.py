"""Tensor parallelism: each replica is computed by several processes, which hold a part of the large layers each.

Run it in one process, which holds everything, or as two replicas of two processes each:

    python scripts/examples/tensor_parallel.py
    torchrun --nproc-per-node 4 scripts/examples/tensor_parallel.py 2

The last line has the loss. It is the same either way; the tables before it say which process holds what.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts

torch.manual_seed(0)
strategy = ts.MirroredStrategy(
    logical_devices_per_replica=int(sys.argv[1]) if len(sys.argv) > 1 else 1,
    sharding_rules={
        "up.weight": ("d0", None),  # rows over the logical devices: each computes some of the hidden units,
        "up.bias": ("d0",),
        "down.weight": (None, "d0"),  # and columns: and adds what they contribute, which one sum brings together
    },
)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 256)
        self.down = nn.Linear(256, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


with strategy.scope():
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)


def train_step(batch):
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


random = torch.Generator().manual_seed(0)
x = torch.randn(2_048, 32, generator=random)
y = (x @ torch.randn(32, 8, generator=random)).sin()
batches = strategy.distribute_dataset(DataLoader(TensorDataset(x, y), batch_size=64))
for _ in range(10):
    for batch in batches:
        losses = strategy.run(train_step, args=(batch,))

explanation = ts.explain_sharding(model, strategy=strategy)
loss = float(strategy.reduce("mean", losses))
if strategy.is_chief:
    print(explanation)
    print(f"loss {loss:.4f}")
strategy.close()
