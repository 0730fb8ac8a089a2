"""A training that may be killed at any moment, and goes on where it was.

Run it, kill it (Ctrl-C, `kill`, `kill -9`), run it again:

    python scripts/examples/resume.py
    torchrun --nproc-per-node 2 scripts/examples/resume.py

With a number (`resume.py 250`) it kills itself after that step. The last line has the loss: the same to the last digit
for a run that was never killed and for one that was, however often. Delete `checkpoints` to begin anew.
"""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts

STEPS = 384
DIES_AT = int(sys.argv[1]) if len(sys.argv) > 1 else None

torch.manual_seed(0)
strategy = ts.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train_step(batch):
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


x = torch.randn(4_096, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=64, shuffle=True)
batches = strategy.distribute_dataset(loader)

# All that the rest of the run depends on: values, the optimizer's state, and which rows come next. Random numbers
# (dropout, the order of rows) are in every checkpoint.
checkpoint = ts.Checkpoint(model=model, optimizer=optimizer, data=batches)
manager = ts.CheckpointManager("checkpoints", max_to_keep=2)
step = manager.restore(checkpoint) or 0  # None where there is no checkpoint yet
if step and strategy.is_chief:
    print(f"goes on after step {step}")

with manager, ts.PreemptionHandler() as preemption:
    while step < STEPS:
        for batch in batches:  # after a restore: the rest of the epoch
            losses = strategy.run(train_step, args=(batch,))
            step += 1
            if step == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            if step < STEPS and preemption.should_stop():  # somebody has sent SIGTERM: there is time to save
                manager.save(checkpoint, step)
                sys.exit(preemption.exit_code)
            if step % 100 == 0:
                manager.save(checkpoint, step, asynchronous=True)
loss = float(strategy.reduce("mean", losses))
if strategy.is_chief:
    print(f"step {step}: loss {loss:.6f}")
strategy.close()
