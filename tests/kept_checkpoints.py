"""A checkpoint of each strategy, as an earlier torchstrat wrote it: every later one has to restore it.

They lie in tests/fixtures/checkpoints, one folder each, with ``expected.pt`` beside: a plain ``torch.save`` of what the
program held when it saved, and of the two random numbers that it drew next. They are never written again: a change of
the format adds a folder of another name. ``python -m tests.kept_checkpoints FOLDER [KIND …]`` is what wrote them;
the kind ``tpu devices`` needs torch_xla.

This program is theirs. It must go on having the same objects, names and shapes.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.support.checkpoints import same
from torchstrat.partitioners import FixedShardsPartitioner
from torchstrat.testing import Workers
from torchstrat.testing.fake_cluster import FakeCluster

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoints"
ROWS = 7
UNUSED_ROWS = 2  # at the end of the table, so that they, and with 4 shards a whole one, have no state
NEW_SEED = 99  # of a program that is to restore


class Kept(nn.Module):
    """Parameters, buffers of many kinds, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 3)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("rates", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("none", torch.zeros(0, 4))
        self.seen: dict[str, Any] = {"steps": 0, "scales": []}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.table(ids).sum(1))
        output: torch.Tensor = self.head(torch.tanh(self.first(hidden)))
        return output

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state

    def note(self, step: int) -> None:
        """What training leaves in other state than parameters."""
        with torch.no_grad():
            self.mask[step % 3] = True
            self.get_buffer("rates").fill_(step + 0.5)
        self.seen.update(steps=step + 1, scales=[0.5 * step, "kept"])  # workers have the module, and keep theirs


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    model = Kept().double()
    model.rates = torch.zeros(2, dtype=torch.bfloat16)
    dense = [*model.norm.parameters(), *model.first.parameters(), *model.head.parameters()]
    adam = torch.optim.Adam(dense, lr=0.01 * (seed + 1))
    return {
        "model": model,
        "adam": adam,
        "rows": torch.optim.SparseAdam(model.table.parameters(), lr=0.05),
        "scheduler": torch.optim.lr_scheduler.StepLR(adam, 2, 0.5),
        "count": ts.Variable(float(seed), name="count", aggregation=ts.VariableAggregation.SUM),
    }


def step_of(objects: dict[str, Any], number: int, optimizers: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, ROWS - UNUSED_ROWS, (4, 2), generator=generator)
    labels = torch.randint(0, 3, (4,), generator=generator)
    for name in optimizers:
        objects[name].zero_grad()
    F.cross_entropy(objects["model"](ids), labels).backward()
    for name in optimizers:
        objects[name].step()
    objects["count"].assign_add(torch.tensor(1.0))


class Job:
    """The program under one strategy. ``train(steps)`` runs there."""

    def __init__(self, objects: dict[str, Any], train: Callable[[range], None]) -> None:
        self.objects = objects
        self.train = train
        self.checkpoint = ts.Checkpoint(**objects)

    def contents(self) -> dict[str, Any]:
        """All that the objects hold, plainly, and the random numbers that the program draws next."""
        held = {name: _plain(value.state_dict()) for name, value in self.objects.items() if name != "count"}
        held["count"] = self.objects["count"].numpy().item()
        held["draws"] = [torch.rand(()).item(), random.random()]
        return held


def _plain(value: Any) -> Any:
    """Without references to what goes on changing, and equal numbers of other classes as themselves."""
    if isinstance(value, ts.Variable) or hasattr(value, "variables"):
        value = torch.as_tensor(value.numpy())
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone().as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


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
            objects["model"].note(number)

    yield Job(objects, train)
    strategy.close()


@contextlib.contextmanager
def on_servers(servers: int, partitioner: Any, seed: int, **options: Any) -> Iterator[Job]:
    with FakeCluster(workers=1, ps=servers) as cluster:
        strategy = cluster.strategy(variable_partitioner=partitioner, **options)
        with strategy.scope():
            objects = make(seed)
        coordinator = ts.ClusterCoordinator(strategy)
        sent = {name: value for name, value in objects.items() if name != "scheduler"}

        def train(steps: range) -> None:
            for number in steps:
                coordinator.schedule(lambda number=number: strategy.run(lambda: step_of(sent, number, BOTH)))
                coordinator.join(timeout=240)
                objects["scheduler"].step()
                objects["model"].note(number)

        yield Job(objects, train)


BOTH, DENSE = ("adam", "rows"), ("adam",)

IN_PROCESS: dict[str, Callable[[int], contextlib.AbstractContextManager[Job]]] = {
    "one_device": lambda seed: synchronous(lambda: ts.OneDeviceStrategy("cpu:0"), seed, BOTH),
    "mirrored": lambda seed: synchronous(lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]), seed, BOTH),
    "central_storage": lambda seed: synchronous(lambda: ts.CentralStorageStrategy(["cpu:0", "cpu:1"]), seed, BOTH),
    "parameter_server": lambda seed: on_servers(2, None, seed),
    "parameter_server_4_shards": lambda seed: on_servers(3, FixedShardsPartitioner(4), seed),
    # Sparse gradients are nothing for a compiled step; the table's optimizer has no state then.
    "tpu": lambda seed: synchronous(lambda: ts.testing.fake_tpu_strategy(2, 2), seed, DENSE),
}

PER_PROCESS: dict[str, Callable[[], ts.Strategy]] = {
    "mirrored_torchrun": ts.MirroredStrategy,
    "central_storage_torchrun": ts.CentralStorageStrategy,
    "multi_worker_mirrored": ts.MultiWorkerMirroredStrategy,
}

ON_TPU = "tpu_devices"

KINDS = (*IN_PROCESS, *PER_PROCESS, ON_TPU)


def job_on_tpu(seed: int) -> contextlib.AbstractContextManager[Job]:
    """On virtual devices of torch_xla."""
    from tests.tpu.models import make_strategy

    return synchronous(lambda: make_strategy(4, 1), seed, DENSE)


def expected(kind: str) -> dict[str, Any]:
    """What the program held that saved the checkpoint."""
    found: dict[str, Any] = torch.load(FIXTURES / kind / "expected.pt", weights_only=True)
    return found


def saved(kind: str) -> Path:
    return FIXTURES / kind / "saved"


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The objects that are not equal bit for bit, but for the classes of numbers and lists."""
    return [name for name in {**found, **wanted} if not same(_plain(found.get(name)), _plain(wanted.get(name)))]


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def restored(job: Job) -> dict[str, list[str]]:
    """Restore what each strategy has saved; by its kind, what is wrong then."""
    wrong = {}
    for kind in KINDS:
        job.checkpoint.restore(saved(kind))
        found, wanted = job.contents(), expected(kind)
        if rank() > 0:
            del found["draws"], wanted["draws"]  # what the first process had drawn
        wrong[kind] = differences(found, wanted)
    return {kind: found for kind, found in wrong.items() if found}


def restored_on_every_rank(kind: str) -> dict[str, list[str]]:
    with synchronous(PER_PROCESS[kind], NEW_SEED, BOTH) as job:
        return restored(job)


def _write(job: Job, folder: Path) -> None:
    job.train(range(3))
    job.checkpoint.save(folder / "saved")
    contents = job.contents()
    if rank() == 0:
        torch.save(contents, folder / "expected.pt")


def _write_on_every_rank(kind: str, folder: str, seed: int) -> None:
    with synchronous(PER_PROCESS[kind], seed, BOTH) as job:
        _write(job, Path(folder))


def main(folder: Path, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        seed = KINDS.index(kind)
        if kind in PER_PROCESS:
            with Workers(2) as workers:
                workers.run(_write_on_every_rank, kind, str(folder / kind), seed)
            continue
        with job_on_tpu(seed) if kind == ON_TPU else IN_PROCESS[kind](seed) as job:
            _write(job, folder / kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or tuple(kind for kind in KINDS if kind != ON_TPU))
