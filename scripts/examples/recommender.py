"""A two-tower recommender: tables on parameter servers, and rows that workers lease.

Run it with two parameter servers and two workers on this machine:

    torchstrat launch --ps 2 --workers 2 scripts/examples/recommender.py

The workers train asynchronously, so the loss differs a little from run to run. The last line does not: it says that
each row was used exactly once in each epoch, which would also be so if a worker had been killed.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import torchstrat as ts

USERS, FILMS, EPOCHS = 500, 200, 5

resolver = ts.cluster_resolver.TFConfigClusterResolver()  # `torchstrat launch` says who is who
strategy = ts.ParameterServerStrategy(resolver, ts.partitioners.MinSizePartitioner(max_shards=2))
coordinator = ts.ClusterCoordinator(strategy)


class Tower(nn.Module):
    """One row of a table, and a layer on top: what is known of a user, or of a film."""

    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(rows, 32)
        self.layer = nn.Linear(32, 16)

    def forward(self, ids):
        return self.layer(self.table(ids))


torch.manual_seed(0)
with strategy.scope():  # what is made here is placed on the servers
    users, films = Tower(USERS), Tower(FILMS)
    optimizer = torch.optim.Adagrad([*users.parameters(), *films.parameters()], lr=0.2)


def dataset_fn():
    """Runs on every worker. A user likes films of one of ten genres; film 17 is of genre 7."""
    random = torch.Generator().manual_seed(0)
    user = torch.randint(USERS, (8_192,), generator=random)
    film = torch.randint(FILMS // 10, (8_192,), generator=random) * 10 + user % 10
    return TensorDataset(user, film)


def train_step(batch):
    user, film = batch
    optimizer.zero_grad()
    scores = users(user) @ films(film).T  # each user against all films of the batch
    likes = (user[:, None] % 10 == film % 10).float()
    loss = nn.functional.binary_cross_entropy_with_logits(scores, likes)
    loss.backward()
    optimizer.step()
    return loss.detach()


def worker_step(batch):
    return strategy.run(train_step, args=(batch,))


leased = coordinator.create_leased_dataset(dataset_fn, batch_size=128, shuffle=True)
for epoch in range(EPOCHS):
    losses = [coordinator.schedule(worker_step, args=(lease,)) for lease in leased]
    coordinator.join()
    leased.ledger.check()  # raises unless each row was used exactly once
    print(f"epoch {epoch}: loss {float(losses[-1].fetch()):.3f}")
print(f"each of {leased.dataset_rows} rows exactly once in each of {EPOCHS} epochs")
