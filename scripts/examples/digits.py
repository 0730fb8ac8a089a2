"""Handwritten digits with a small convolutional net: the program to start from.

Run it in one process, or with one replica in each of two:

    python scripts/examples/digits.py
    torchrun --nproc-per-node 2 scripts/examples/digits.py

The last line has the accuracy on the digits that were held out. It is the same either way: a batch of 64 is 64 rows in
one process, and 32 rows in each of two.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn: pip install scikit-learn")

torch.manual_seed(0)
strategy = ts.MirroredStrategy()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
labels = torch.tensor(digits.target)
held_out = torch.arange(len(labels)) % 5 == 0
train_rows = TensorDataset(images[~held_out], labels[~held_out])
test_rows = TensorDataset(images[held_out], labels[held_out])
order = torch.Generator().manual_seed(0)
train_batches = strategy.distribute_dataset(DataLoader(train_rows, batch_size=64, shuffle=True, generator=order))
test_batches = strategy.distribute_dataset(DataLoader(test_rows, batch_size=64))

with strategy.scope():
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)


def train_step(batch):
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def count_right(batch):
    x, y = batch
    return (model(x).argmax(dim=1) == y).sum()


for epoch in range(10):
    for batch in train_batches:
        losses = strategy.run(train_step, args=(batch,))
    loss = float(strategy.reduce("mean", losses, weighted=True))
    if strategy.is_chief:
        print(f"epoch {epoch}: loss {loss:.3f}")

right = sum(int(strategy.reduce("sum", strategy.run(count_right, args=(batch,)))) for batch in test_batches)
if strategy.is_chief:
    print(f"{right / len(test_rows):.1%} of {len(test_rows)} held-out digits are right")
strategy.close()
