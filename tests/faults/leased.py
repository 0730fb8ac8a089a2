"""A training that counts on the servers how often each row was trained on, for processes that are killed meanwhile."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS, PAUSE_SECONDS
from torchstrat import Checkpoint, Lease
from torchstrat.cluster_resolver import ClusterResolver

ROWS = 3000
AT_A_TIME = 6


class Counts(nn.Module):
    """Two vectors, so that two servers have one each: how often each row was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(ROWS)) for _ in range(2))


class LeasedTraining:
    """Each function adds 1 at its rows' places of both vectors, in two pushes."""

    def __init__(self, resolver: ClusterResolver, batch_size: int, seed: int = 0) -> None:
        self.strategy = strategy = ts.ParameterServerStrategy(resolver)
        with strategy.scope():
            self.model = model = Counts()
            self.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        self.coordinator = coordinator = ts.ClusterCoordinator(strategy)
        self.leased = coordinator.create_leased_dataset(lambda: range(ROWS), batch_size, shuffle=True, seed=seed)
        self.checkpoint = Checkpoint(model=model, optimizer=optimizer, data=self.leased)

        def count(rows: torch.Tensor) -> tuple[list[int], int]:
            for _ in range(2):
                model.zero_grad()
                sum(-vector[rows].sum() for vector in model.vectors).backward()
                optimizer.step()
            return rows.tolist(), coordinator.get_current_worker_index()

        self._count = count

    def schedule(self, leases: Iterator[Lease] | Any) -> list[ts.RemoteValue]:
        return [self.coordinator.schedule(self._count, args=(lease,)) for lease in leases]

    def train_until(self, condition: Callable[[], bool], what: str) -> list[tuple[list[int], int]]:
        """A few functions at a time, until something is true that they bring about: rows and worker of each."""
        until, leases, ended = time.monotonic() + PATIENCE_SECONDS, iter(self.leased), []
        while not condition():
            assert time.monotonic() < until, f"{what} did not come true within {PATIENCE_SECONDS:g} s"
            values = self.schedule(itertools.islice(leases, AT_A_TIME))
            assert values, f"the epoch was over before {what}"
            ended += [value.get(PATIENCE_SECONDS) for value in values]
            time.sleep(PAUSE_SECONDS)
        return ended

    def train(self) -> list[tuple[list[int], int]]:
        """What is left of the epoch."""
        values = self.schedule(self.leased)
        self.coordinator.join(PATIENCE_SECONDS)
        return [value.get() for value in values]

    def check_counts(self, times: int) -> None:
        """Every row was trained on so many times."""
        for name, vector in self.model.state_dict().items():
            wrong = (vector != times).nonzero().flatten().tolist()
            assert not wrong, f"{len(wrong)} rows of {name}: {[(row, float(vector[row])) for row in wrong[:10]]}"
