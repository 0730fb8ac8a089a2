"""``on_server_loss="restore"``: servers of a real cluster are killed in the middle of training; nobody intervenes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS
from torchstrat.launch import LocalCluster
from torchstrat.launch.restarts import RestartPolicy
from torchstrat.parameter_server.variables.server_group import ServerGroup

ROWS = 96
SIZE = 4096
"""Of a vector: large enough for gradients to go through shared memory."""
EPOCHS = 2
EVERY = 8
"""Leases from one checkpoint to the next."""
RESTART_AT_ONCE = RestartPolicy(first_delay_seconds=0.0)

pytestmark = [
    pytest.mark.deadline(420),
    pytest.mark.filterwarnings("ignore:.*was not saved:UserWarning"),  # a kill may meet a save that is under way
]


class Counters(nn.Module):
    """Three vectors on two servers; each row adds 1 at its place of each."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(SIZE)) for _ in range(3))


class Training:
    """What a user writes, and the place at which something happens to the cluster."""

    def __init__(self, cluster: LocalCluster, folder: Path, *, on_server_loss: Any = "restore") -> None:
        self.strategy = ts.ParameterServerStrategy(cluster.resolver, on_server_loss=on_server_loss)
        with self.strategy.scope():
            self.model = Counters()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.coordinator = ts.ClusterCoordinator(self.strategy)
        self.leased = self.coordinator.create_leased_dataset(lambda: range(ROWS), batch_size=2, shuffle=True)
        self.manager = ts.CheckpointManager(folder / "checkpoints")
        self.restored: list[int] = []

    def run(self, after_lease: Callable[[int], None], *, saves_position: bool = True) -> None:
        model, optimizer, coordinator, manager = self.model, self.optimizer, self.coordinator, self.manager
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
        checkpoint = ts.Checkpoint(**objects, **({"data": self.leased} if saves_position else {}))
        if self.strategy._on_server_loss == "restore":
            coordinator.restore_on_server_loss(manager, checkpoint, on_restored=self.restored.append)

        def train_step(rows):
            model.zero_grad()
            sum(-vector[rows].sum() for vector in model.vectors).backward()
            optimizer.step()

        step = 0
        manager.save(checkpoint, step)
        while self.leased.epoch < EPOCHS:
            for lease in self.leased:
                coordinator.schedule(train_step, args=(lease,))
                step += 1
                after_lease(step)
                if step % EVERY == 0:
                    manager.save(checkpoint, step, asynchronous=True)
            coordinator.join(PATIENCE_SECONDS)
        manager.close()

    def close(self) -> None:
        self.strategy.close()

    def counts(self) -> list[torch.Tensor]:
        return [vector[:ROWS] for vector in self.model.state_dict().values()]


@pytest.fixture
def cluster() -> Any:
    with LocalCluster(2, 2, env={"TORCH_CPP_LOG_LEVEL": "ERROR"}, restart=RESTART_AT_ONCE) as running:
        running.wait_until_listening()
        yield running


def kill_at(cluster: LocalCluster, kills: dict[int, tuple[int, ...]]) -> tuple[Callable[[int], None], list[int]]:
    """``kills``: after which lease which servers are killed with SIGKILL. With the pids of those that were."""
    killed: list[int] = []

    def after_lease(step: int) -> None:
        killed.extend(cluster.kill("ps", index) for index in kills.get(step, ()))

    return after_lease, killed


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param({13: (1,)}, id="one"),
        pytest.param({13: (0, 1)}, id="two at once", marks=pytest.mark.soak),
        pytest.param({5: (0,), 40: (1,)}, id="two", marks=pytest.mark.soak),
    ],
)
def test_every_row_counts_once(cluster: LocalCluster, kills: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    training = Training(cluster, tmp_path)
    workers = [cluster.process("worker", index).pid for index in range(2)]
    after_lease, killed = kill_at(cluster, kills)
    began = time.monotonic()
    try:
        training.run(after_lease)
        print(f"{len(killed)} kills, restored {training.restored}, {time.monotonic() - began:.1f} s in all")
        for vector in training.counts():
            assert torch.equal(vector, torch.full_like(vector, EPOCHS))
        assert len(killed) == sum(map(len, kills.values()))
        assert len(training.restored) >= len(kills)
        assert workers == [cluster.process("worker", index).pid for index in range(2)]
    finally:
        training.close()


def test_another_server_dies_during_the_restore(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(cluster, tmp_path)
    after_lease, killed = kill_at(cluster, {13: (1,)})
    ask = ServerGroup.ask

    def kill_who_reads(group: ServerGroup, method: str, *args: Any, **options: Any) -> Any:
        if method == "ps.read_checkpoint" and len(killed) == 1:
            killed.append(cluster.kill("ps", 0))
        return ask(group, method, *args, **options)

    monkeypatch.setattr(ServerGroup, "ask", kill_who_reads)
    try:
        training.run(after_lease)
        for vector in training.counts():
            assert torch.equal(vector, torch.full_like(vector, EPOCHS))
        assert len(killed) == 2
        assert training.restored
    finally:
        training.close()


@pytest.mark.soak  # with threads for processes: tests/unit/test_server_loss.py
def test_with_raise_the_same_program_ends_with_the_error(cluster: LocalCluster, tmp_path: Path) -> None:
    """The control."""
    training = Training(cluster, tmp_path, on_server_loss="raise")
    try:
        with pytest.raises(ts.errors.ParameterServerUnavailable, match="parameter server 1"):
            training.run(kill_at(cluster, {13: (1,)})[0])
    finally:
        training.close()


@pytest.mark.soak
def test_without_the_position_of_the_rows_counts_are_wrong(cluster: LocalCluster, tmp_path: Path) -> None:
    """The control."""
    training = Training(cluster, tmp_path)

    def after_lease(step: int) -> None:
        if step == 13:
            training.coordinator.join(PATIENCE_SECONDS)  # so that something was trained since the checkpoint
            cluster.kill("ps", 1)

    try:
        training.run(after_lease, saves_position=False)
        assert training.restored
        assert min(float(vector.min()) for vector in training.counts()) < EPOCHS
    finally:
        training.close()
