"""A training on servers that die: a program whose loop knows nothing of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from torchstrat import CheckpointManager
from torchstrat.testing.fake_cluster import FakeCluster

WAIT = 60
STEPS = 12
EVERY = 4
"""Steps from one checkpoint to the next."""


class Counters(nn.Module):
    """Three vectors on two servers; step n adds 1 at place n of each."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(STEPS + 1)) for _ in range(3))


class Progress:
    """How far the training is."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Program:
    """One coordinator's program."""

    def __init__(
        self,
        cluster: FakeCluster,
        folder: Path,
        *,
        on_server_loss: Any = "restore",
        timeout_seconds: float = WAIT,
        **options: Any,
    ) -> None:
        self.cluster = cluster
        timeout = timedelta(seconds=timeout_seconds)
        self.strategy = strategy = cluster.strategy(on_server_loss=on_server_loss, timeout=timeout)
        with strategy.scope():
            self.model = model = Counters()
            self.optimizer = optimizer = torch.optim.Adagrad(model.parameters(), lr=1.0)
            self.total = total = ts.Variable(0.0, name="total")
        self.coordinator = ts.ClusterCoordinator(strategy)
        self.progress, self.manager = Progress(), CheckpointManager(folder)
        self.checkpoint = ts.Checkpoint(model=model, optimizer=optimizer, total=total, progress=self.progress)
        self.restored: list[int] = []
        options.setdefault("on_restored", self.restored.append)
        if on_server_loss == "restore":
            self.coordinator.restore_on_server_loss(self.manager, self.checkpoint, **options)

        def count(place: int) -> int:
            model.zero_grad()
            sum(-vector[place] for vector in model.vectors).backward()
            optimizer.step()
            total.assign_add(1.0)
            return place

        self.count = count

    def schedule(self, *places: int) -> list[Any]:
        return [self.coordinator.schedule(self.count, args=(place,)) for place in places]

    def join(self) -> None:
        self.coordinator.join(timeout=WAIT)

    def kill(self, *servers: int) -> None:
        for index in servers:
            self.cluster.kill_server(index)

    def kill_and_tell(self, *servers: int) -> None:
        """The same; the coordinator knows when this returns."""
        for index in servers:
            self.cluster.wait_until_lost(self.cluster.kill_server(index))

    def train(self, meanwhile: Callable[[int], None] = lambda step: None, steps: int = STEPS) -> None:
        """The loop that a user writes. ``meanwhile``: what happens to the cluster after each call of `schedule`."""
        if self.manager.latest is None:
            self.manager.save(self.checkpoint, 0)
        made = 0
        while self.progress.step < steps:
            self.progress.step += 1
            self.schedule(self.progress.step)
            made += 1
            meanwhile(made)
            if self.progress.step % EVERY == 0:
                self.join()
                self.manager.save(self.checkpoint, self.progress.step)

    def counts(self) -> list[list[float]]:
        """How often each step was made, by each vector: Adagrad's sum of squares, which counts gradients of size 1."""
        sums = [state["sum"][1:] for state in self.optimizer.state_dict()["state"].values()]
        for vector, counted in zip(self.model.state_dict().values(), sums, strict=True):
            trained = torch.tensor([sum(made**-0.5 for made in range(1, int(count) + 1)) for count in counted])
            torch.testing.assert_close(vector[1:], trained)
        return [counted.tolist() for counted in sums]

    def assert_exact(self, steps: int = STEPS) -> None:
        """Every step once, up to this one."""
        assert self.counts() == [[1.0] * steps + [0.0] * (STEPS - steps)] * 3

    def assert_goes_on(self, restored: int = EVERY) -> None:
        """All is as at this step, one restore led there, and the rest of the training is exact."""
        assert self.restored == [restored]
        self.assert_exact(restored)
        self.train()
        self.assert_exact()


@contextmanager
def program(folder: Path, *, workers: int = 2, trained: int = 0, **options: Any) -> Iterator[Program]:
    """``trained``: steps that are made already. Servers that die are started again once somebody waits for them."""
    restarts = options.pop("restarts_servers", True)
    with FakeCluster(workers=workers, ps=2, restarts_servers=restarts) as cluster:
        running = Program(cluster, folder / "checkpoints", **options)
        if trained:
            running.train(steps=trained)
        yield running
