"""Evaluation beside training: a second process scores each checkpoint, and training does not wait for it.

Run both, in either order:

    python scripts/examples/evaluation.py evaluate &
    python scripts/examples/evaluation.py train

Training may as well be `torchrun --nproc-per-node 2 … train`. The evaluator ends when training has. Its last line is
the score of the last checkpoint; killed and started again, it goes on with the first checkpoint that has no score.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts

EPOCHS = 5


def make_model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))


def rows(seed, number):
    """Points in 16 dimensions; the question is whether they lie within a sphere that half of them lie in."""
    x = torch.randn(number, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.square().sum(dim=1) < 15.3).long())


def accuracy(outputs, targets):
    return (outputs.argmax(dim=1) == targets).float()  # one number per row


def train():
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train_step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    batches = strategy.distribute_dataset(DataLoader(rows(0, 8_192), batch_size=64))
    checkpoint = ts.Checkpoint(model=model, optimizer=optimizer)
    manager = ts.CheckpointManager("checkpoints", max_to_keep=None)
    for epoch in range(EPOCHS):
        for batch in batches:
            strategy.run(train_step, args=(batch,))
        manager.save(checkpoint, epoch + 1)
    manager.close(finished=True)  # the evaluator then scores what is left, and ends
    strategy.close()


def evaluate():
    evaluator = ts.SidecarEvaluator(
        make_model, DataLoader(rows(1, 2_048), batch_size=256), "checkpoints", metrics={"accuracy": accuracy}
    )
    for evaluation in evaluator.start():
        print(f"checkpoint {evaluation.step}: accuracy {evaluation.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    {"train": train, "evaluate": evaluate}[sys.argv[1]]()
