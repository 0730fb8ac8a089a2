"""The same small job under every strategy, for the table of who restores what whom has saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from torchstrat.partitioners import FixedShardsPartitioner, MinSizePartitioner
from torchstrat.testing.fake_cluster import FakeCluster

ROWS = 13  # odd, so that no two numbers of shards cut it alike


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, sparse=True)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.body(self.table(ids).sum(1)))
        return output


@dataclass(frozen=True)
class Job:
    """``train(steps)`` runs under the job's strategy; ``checkpoint`` is of everything."""

    objects: dict[str, Any]
    train: Callable[[range], None]

    @property
    def checkpoint(self) -> ts.Checkpoint:
        return ts.Checkpoint(**self.objects)


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net().double()
    adam = torch.optim.Adam([*model.body.parameters(), *model.head.parameters()], lr=0.02 * (seed + 1), amsgrad=True)
    return {
        "model": model,
        "adam": adam,
        "rows": torch.optim.SparseAdam(model.table.parameters(), lr=0.05 * (seed + 1)),
        "scheduler": torch.optim.lr_scheduler.StepLR(adam, 2, 0.5),
        "seen": ts.Variable(float(seed), name="seen", aggregation=ts.VariableAggregation.SUM),
    }


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last rows of the table are never in it: they, and with five shards a whole one, have no state."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS - 3, (4, 2), generator=generator), torch.randint(0, 3, (4,), generator=generator)


def step_of(objects: dict[str, Any], number: int, optimizers: tuple[str, ...] = ("adam", "rows")) -> None:
    ids, labels = batch(number)
    for name in optimizers:
        objects[name].zero_grad()
    F.cross_entropy(objects["model"](ids), labels).backward()
    for name in optimizers:
        objects[name].step()
    objects["seen"].assign_add(torch.tensor(1.0))


@contextlib.contextmanager
def synchronous(make_strategy: Callable[[], ts.Strategy], seed: int, optimizers: tuple[str, ...]) -> Iterator[Job]:
    strategy = make_strategy()
    with strategy.scope():
        objects = make(seed)
    objects["model"].table.sparse = "rows" in optimizers

    def train(steps: range) -> None:
        for number in steps:
            strategy.run(lambda number=number: step_of(objects, number, optimizers))
            objects["scheduler"].step()

    yield Job(objects, train)
    strategy.close()


@contextlib.contextmanager
def on_servers(servers: int, partitioner: Any, seed: int) -> Iterator[Job]:
    with FakeCluster(workers=1, ps=servers) as cluster:
        strategy = cluster.strategy(variable_partitioner=partitioner, rows_only=True)
        with strategy.scope():
            objects = make(seed)
        coordinator = ts.ClusterCoordinator(strategy)
        sent = {name: value for name, value in objects.items() if name != "scheduler"}

        def train(steps: range) -> None:
            for number in steps:
                coordinator.schedule(lambda number=number: strategy.run(lambda: step_of(sent, number)))
                objects["scheduler"].step()
            coordinator.join(timeout=240)

        yield Job(objects, train)


BOTH, DENSE = ("adam", "rows"), ("adam",)

IN_PROCESS: dict[str, Callable[[int], contextlib.AbstractContextManager[Job]]] = {
    "one_device": lambda seed: synchronous(lambda: ts.OneDeviceStrategy("cpu:0"), seed, BOTH),
    "mirrored x2": lambda seed: synchronous(lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]), seed, BOTH),
    "central_storage": lambda seed: synchronous(lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"]), seed, BOTH),
    "1 server": lambda seed: on_servers(1, None, seed),
    "2 servers": lambda seed: on_servers(2, FixedShardsPartitioner(2), seed),
    "3 servers": lambda seed: on_servers(3, MinSizePartitioner(min_shard_bytes=64, max_shards=3), seed),
    "2 servers, 5 shards": lambda seed: on_servers(2, FixedShardsPartitioner(5), seed),
    # Sparse gradients are nothing for a compiled step; the table's state goes through from the checkpoint before.
    "tpu 4x1": lambda seed: synchronous(lambda: ts.testing.fake_tpu_strategy(4, 1), seed, DENSE),
    "tpu 2x2": lambda seed: synchronous(lambda: ts.testing.fake_tpu_strategy(2, 2), seed, DENSE),
}

PER_PROCESS: dict[str, Callable[[], ts.Strategy]] = {
    "mirrored, torchrun": ts.MirroredStrategy,
    "central_storage, torchrun": ts.CentralStorageStrategy,
}


def save(job: Job, folder: Path, steps: range, begin: Path | None = None) -> None:
    """``begin``: a checkpoint to begin with."""
    if begin is not None:
        job.checkpoint.restore(begin)
    job.train(steps)
    job.checkpoint.save(folder)


def restore(job: Job, saved: dict[str, str], folder: Path) -> None:
    """Restore each of ``saved``, and save what is there then, under the same name, into ``folder``."""
    for name, path in saved.items():
        job.checkpoint.restore(path)
        job.checkpoint.save(folder / name)


def save_on_every_rank(kind: str, folder: str, seed: int) -> None:
    with synchronous(PER_PROCESS[kind], seed, BOTH) as job:
        save(job, Path(folder), range(4))


def restore_on_every_rank(kind: str, saved: dict[str, str], folder: str) -> None:
    with synchronous(PER_PROCESS[kind], 99, BOTH) as job:
        restore(job, saved, Path(folder))
