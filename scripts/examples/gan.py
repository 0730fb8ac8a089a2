"""A GAN: two models, two optimizers, one step. The generator learns to draw from a normal distribution.

Run it in one process, or with one replica in each of two:

    python scripts/examples/gan.py
    torchrun --nproc-per-node 2 scripts/examples/gan.py

The last line compares what the generator draws with what it was shown. It is the same either way, because the noise is
part of the batch: what a step draws itself (``torch.randn``) is another stream on each replica.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts

torch.manual_seed(0)
strategy = ts.MirroredStrategy()


def perceptron(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


with strategy.scope():
    generator = perceptron(4, 1)
    critic = perceptron(1, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.001, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.001, betas=(0.5, 0.9))


def is_real(x, answer):
    """The loss of a critic that is asked whether ``x`` is real, where ``answer`` would be right."""
    scores = critic(x)
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, answer))


def train_step(batch):
    real, noise = batch

    critic_optimizer.zero_grad()
    critic_loss = is_real(real, 1.0) + is_real(generator(noise).detach(), 0.0)
    critic_loss.backward()
    critic_optimizer.step()

    generator_optimizer.zero_grad()
    generator_loss = is_real(generator(noise), 1.0)
    generator_loss.backward()
    generator_optimizer.step()


random = torch.Generator().manual_seed(0)
real = 3.0 + 0.5 * torch.randn(8_192, 1, generator=random)
noise = torch.randn(8_192, 4, generator=random)
loader = DataLoader(TensorDataset(real, noise), batch_size=128, shuffle=True, generator=random)
batches = strategy.distribute_dataset(loader)
for _ in range(4):
    for batch in batches:
        strategy.run(train_step, args=(batch,))

with torch.no_grad():
    fake = generator(torch.randn(8_192, 4, generator=torch.Generator().manual_seed(1)))
if strategy.is_chief:
    print(f"mean {fake.mean():.1f} (real: {real.mean():.1f}), spread {fake.std():.1f} (real: {real.std():.1f})")
strategy.close()
