"""A training on servers that die: a program whose loop knows nothing of that, and what starts servers again."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
    """One coordinator's program. ``saves_progress``: False for one that forgets to."""

    def __init__(
        self,
        cluster: FakeCluster,
        folder: Path,
        *,
        on_server_loss: Any = "restore",
        saves_progress: bool = True,
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
        self.progress = Progress()
        self.manager = CheckpointManager(folder)
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "total": total}
        self.checkpoint = ts.Checkpoint(**objects, **({"progress": self.progress} if saves_progress else {}))
        self.restored: list[int] = []
        if on_server_loss == "restore":
            self.coordinator.restore_on_server_loss(
                self.manager, self.checkpoint, on_restored=self.restored.append, **options
            )

        def count(place: int) -> int:
            model.zero_grad()
            sum(-vector[place] for vector in model.vectors).backward()
            optimizer.step()
            total.assign_add(1.0)
            return place

        self.count = count

    def train(self, meanwhile: Callable[[int], None] = lambda step: None, steps: int = STEPS) -> None:
        """The loop that a user writes. ``meanwhile``: what happens to the cluster after each call of `schedule`."""
        if self.manager.latest is None:
            self.manager.save(self.checkpoint, 0)
        made = 0
        while self.progress.step < steps:
            self.progress.step += 1
            self.coordinator.schedule(self.count, args=(self.progress.step,))
            made += 1
            meanwhile(made)
            if self.progress.step % EVERY == 0:
                self.coordinator.join(timeout=WAIT)
                self.manager.save(self.checkpoint, self.progress.step)

    def counts(self) -> list[list[float]]:
        """How often each step was made, by each vector: Adagrad's sum of squares, which counts gradients of size 1."""
        sums = [state["sum"][1:] for state in self.optimizer.state_dict()["state"].values()]
        for vector, counted in zip(self.model.state_dict().values(), sums, strict=True):
            trained = torch.tensor([sum(made**-0.5 for made in range(1, int(count) + 1)) for count in counted])
            torch.testing.assert_close(vector[1:], trained)
        return [counted.tolist() for counted in sums]


def exact(steps: int = STEPS) -> list[list[float]]:
    """Every step once, up to this one."""
    return [[1.0] * steps + [0.0] * (STEPS - steps)] * 3


class Launcher:
    """Starts servers that have died again, once somebody waits for them."""

    def __init__(self, program: Program) -> None:
        membership = program.strategy._job.membership
        self._dispatcher = program.coordinator._dispatcher
        self._cluster, self._wait_for = program.cluster, membership.wait_for
        self._lock = threading.Lock()
        self._down: list[int] = []
        membership.wait_for = self._start_and_wait

    def kill(self, *servers: int) -> None:
        for index in servers:
            self._cluster.kill_server(index)
        with self._lock:
            self._down += servers

    def kill_and_tell(self, *servers: int) -> None:
        """The same; the coordinator knows when this returns."""
        self.kill(*servers)
        with self._dispatcher._changed:
            assert self._dispatcher._wait_for(lambda: self._dispatcher._scheduler.servers_lost, WAIT)

    def _start_and_wait(self, tasks: Any, timeout_seconds: float) -> None:
        with self._lock:
            down, self._down = self._down, []
        for index in down:
            self._cluster.start_server(index)
        self._wait_for(tasks, timeout_seconds)
