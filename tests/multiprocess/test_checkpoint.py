"""Checkpoints with one replica per process: all write together, each value once, all read, and none goes on alone."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.checkpoint_writes import WAIT, held_writes
from tests.support.checkpoints import flip, same
from torchstrat import Checkpoint
from torchstrat.errors import TorchstratError
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]


class Job:
    """Eight tensors of 1 MiB to be shared out, with Adam's, and small ones."""

    def __init__(self, strategy: ts.Strategy | None = None, seed: int = 7) -> None:
        self.strategy = strategy
        torch.manual_seed(seed)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            self.model = nn.ModuleList([nn.Linear(512, 512) for _ in range(4)])
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
            self.seen = ts.Variable(
                0.0, aggregation=ts.VariableAggregation.SUM, synchronization=ts.VariableSynchronization.ON_READ
            )
        self.checkpoint = Checkpoint(model=self.model, optimizer=self.optimizer, seen=self.seen)

    def train(self) -> None:
        def step() -> None:
            self.optimizer.zero_grad()
            sum(layer(torch.ones(1, 512)).square().mean() for layer in self.model).backward()
            self.optimizer.step()
            self.seen.assign_add(torch.tensor(1.0))

        assert self.strategy is not None
        self.strategy.run(step)

    def values(self) -> list[torch.Tensor]:
        return [*(parameter.detach().clone() for parameter in self.model.parameters()), self.seen.read_value()]


def told(*calls: Callable[[], object]) -> list[str]:
    """What these raise, "" where it is nothing."""
    messages = []
    for call in calls:
        try:
            call()
            messages.append("")
        except TorchstratError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


# -- together ---------------------------------------------------------------------------------------------------------


def restore_a_part(kind: str, path: str) -> list[str]:
    strategy = {"central": ts.CentralStorageStrategy, "mirrored": ts.MirroredStrategy}[kind]()
    job = Job(strategy, seed=0)
    job.train()
    job.checkpoint.save(path)
    saved = job.values()
    job.train()
    trained, restore = job.values(), job.checkpoint.restore
    state = job.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    rank = int(os.environ["RANK"])
    messages = told(
        lambda: restore(path, only=("model.0",) if rank == 0 else ("model.1",)),
        lambda: restore(path, strict=rank == 0),
        lambda: restore(path, only=f"model.{7 + rank}"),
    )
    assert same(job.values(), trained)
    restore(path, only=["model.1", "model.0.bias"] if rank == 0 else ("model.0.bias", "model.1"))
    expected = [trained[0], *saved[1:4], *trained[4:]]
    assert same(job.values(), expected)
    assert same(job.optimizer.state_dict()["state"][0]["exp_avg"], state)
    job.train()
    strategy.close()
    return messages


@pytest.mark.parametrize("kind", ["central", "mirrored"])
def test_a_part_is_restored_by_all_ranks_or_none(kind: str, two_processes: Workers, tmp_path: Path) -> None:
    each = two_processes.run(restore_a_part, kind, str(tmp_path / "saved"))
    for rank, (names, strict, unknown) in enumerate(each):
        for other in ("only=('model.0',)", "only=('model.1',)"):
            assert other in names
        assert "restore(strict=False)" in strict
        assert f"'model.{7 + rank}', which is no name" in unknown
        assert names.startswith("ReplicaDivergenceError")


class Refuses:
    """An object that rank 1 does not take back."""

    def state_dict(self) -> dict[str, int]:
        return {"version": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if os.environ["RANK"] == "1":
            raise TorchstratError("another version")


def call_differently(path: str) -> list[str]:
    """Each rank names another path, step, directory or object."""
    strategy = ts.MirroredStrategy()
    job, rank = Job(strategy), int(os.environ["RANK"])
    job.checkpoint.save(path)
    own = Checkpoint(**{("model", "net")[rank]: job.model})
    with ts.CheckpointManager(path + "-steps") as manager, ts.CheckpointManager(f"{path}-{rank}") as elsewhere:
        messages = told(
            lambda: job.checkpoint.save(f"{path}-{rank}"),
            lambda: job.checkpoint.save(f"{path}-{rank}", asynchronous=True),
            lambda: own.save(path),
            lambda: job.checkpoint.restore(path if rank == 0 else path + "-other"),
            lambda: own.restore(path),
            lambda: manager.save(job.checkpoint, 7 + rank),
            lambda: manager.save(own, 7),
            lambda: elsewhere.save(job.checkpoint, 7),
            lambda: elsewhere.restore(job.checkpoint),
            elsewhere.claim,
        )
        manager.save(job.checkpoint, 7)
    refused = Checkpoint(model=job.model, own=Refuses())
    refused.save(path + "-own")
    job.train()
    trained = job.values()
    messages += told(lambda: refused.restore(path + "-own"))
    assert same(job.values(), trained), "variables stay on the rank that took its object back, too"
    job.checkpoint.restore(path)
    strategy.close()
    return messages


def test_what_ranks_call_differently_is_an_error_of_all(two_processes: Workers, tmp_path: Path) -> None:
    first, second = two_processes.run(call_differently, str(tmp_path / "saved"))
    assert first.pop().endswith("saved-own failed on rank 1: TorchstratError: another version")
    assert second.pop() == "TorchstratError: another version"
    assert first == second
    differing = ["saved-0", "saved-0", "of model to", "saved, ", "of model from", "000007", "of model to"]
    for message, one in zip(first, [*differing, "saved-0", "saved-0", "saved-0"], strict=True):
        assert message.startswith(
            "ReplicaDivergenceError: the replicas no longer make the same calls: replica 0 called"
        )
        assert one in message
    assert sorted(name for name in os.listdir(tmp_path)) == ["saved", "saved-own", "saved-steps"]


def save(kind: str, path: str, asynchronous: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    strategy = ts.CentralStorageStrategy() if kind == "central" else ts.MirroredStrategy()
    job = Job(strategy, seed=0)
    job.train()
    saved = job.values()
    with held_writes() as held:
        if not asynchronous:
            held.go_on.set()
        handle = job.checkpoint.save(path, asynchronous=asynchronous)
        held.wait_until_reached()
        job.train()  # the strategy's own messages meet those of the save
        held.go_on.set()
        handle.result(WAIT)
    assert os.path.isfile(os.path.join(path, ".metadata"))  # every rank sees it
    later = job.values()
    job.checkpoint.restore(path)
    assert same(job.values(), saved)
    job.train()
    assert same(job.values(), later)
    strategy.close()
    return saved, later


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_the_bytes_are_shared_out(kind: str, asynchronous: bool, two_processes: Workers, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    (saved, later), _ = two_processes.run(save, kind, str(path), asynchronous)
    assert not any(map(torch.equal, saved, later))
    assert os.listdir(tmp_path) == ["saved"]
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    # Values of 4 MiB and the optimizer's 8 MiB, which both see.
    assert sum(sizes) < 13 << 20, "written once"
    assert abs(sizes[0] - sizes[1]) < 2 << 20
    job = Job()
    job.checkpoint.restore(path)
    assert same(job.values(), saved)
    assert float(job.seen) == 2.0
    assert all(float(state["step"]) == 1.0 for state in job.optimizer.state_dict()["state"].values())


def keep_buffers(path: str) -> tuple[list[float], float, list[list[float]]]:
    """A quantized one, and one of which one row is in memory and stands for all."""
    warnings.simplefilter("ignore")  # torch deprecates quantized ones
    strategy = ts.MirroredStrategy()

    def module(numbers: list[float], scale: float) -> nn.Module:
        made = nn.Linear(2, 2)
        made.register_buffer("table", torch.quantize_per_tensor(torch.tensor(numbers), scale, 1, torch.qint8))
        made.register_buffer("row", torch.tensor(numbers).expand(3, 2))
        return made

    with strategy.scope():  # as in any creation, the first rank's are those of all
        saved = module([0.5, -0.5], 0.1) if strategy.is_chief else module([9.0, 9.0], 0.7)
        fresh = module([0.0, 0.0], 0.3)
        fresh.row = fresh.row.clone()  # PyTorch puts nothing into a row that stands for all
    strategy.run(lambda: saved(torch.ones(1, 2)) + saved.row.sum())
    strategy.extended.check_replicas()
    Checkpoint(model=saved).save(path)
    Checkpoint(model=fresh).restore(path)
    strategy.close()
    assert saved.table.dequantize().tolist() == fresh.table.dequantize().tolist()
    assert saved.row.tolist() == fresh.row.tolist()
    return fresh.table.dequantize().tolist(), fresh.table.q_scale(), fresh.row.tolist()


def test_quantized_and_expanded_buffers(two_processes: Workers, tmp_path: Path) -> None:
    found = two_processes.run(keep_buffers, str(tmp_path / "saved"))
    assert found == [(pytest.approx([0.5, -0.5]), 0.1, [[0.5, -0.5]] * 3)] * 2


def save_after_trials(lagging: int, path: str) -> float:
    """Objects of no strategy, while one process still has two that are over: one closed, and one only dropped."""
    closed, dropped = ts.MirroredStrategy(), ts.MirroredStrategy()
    closed.close()
    if int(os.environ["RANK"]) != lagging:
        closed = None
        del dropped
        gc.collect()
    fresh = ts.MirroredStrategy()
    gc.disable()  # as if none happened to come before the save
    try:
        dropped = None
        model = nn.Linear(2, 2)
        wanted = model.weight.detach().clone()
        Checkpoint(model=model).save(path)
        nn.init.zeros_(model.weight)
        Checkpoint(model=model).restore(path)
    finally:
        gc.enable()
    fresh.close()
    return float((model.weight - wanted).abs().max())


@pytest.mark.parametrize("lagging", [0, 1])
def test_strategies_that_are_over_take_no_part(tmp_path: Path, two_processes: Workers, lagging: int) -> None:
    assert two_processes.run(save_after_trials, lagging, str(tmp_path / "saved"))[0] == 0


# -- what fails on one ------------------------------------------------------------------------------------------------


def fail(path: str, asynchronous: bool) -> list[str]:
    """Rank 1 cannot see what is restored; nobody can make a folder; rank 1 has no space; and it does not see it."""
    strategy = ts.MirroredStrategy()
    job, is_first = Job(strategy, seed=0), strategy.is_chief
    job.checkpoint.save(path)
    job.train()
    moved = job.values()
    lost = Checkpoint(model=job.model, own=nn.Module() if is_first else nn.Linear(2, 2))
    with held_writes(full=not is_first) as held:
        held.go_on.set()
        messages = told(lambda: job.checkpoint.save(path, asynchronous=asynchronous).result(WAIT))
    is_dir, is_file, exists = Path.is_dir, Path.is_file, Path.exists
    sees = {
        "is_file": lambda path: is_first and is_file(path),
        "exists": lambda path: is_first and exists(path),
    }
    with mock.patch.multiple(Path, **sees):
        messages += told(lambda: job.checkpoint.restore(path))
    messages += told(lambda: job.checkpoint.save(os.path.join(path, ".metadata", "below")))
    with mock.patch.object(Path, "is_dir", lambda path: (is_first or ".writing-" not in path.name) and is_dir(path)):
        messages += told(lambda: lost.save(path + "-lost"), lambda: job.checkpoint.save(path + "-next"))
    assert same(job.values(), moved)
    strategy.close()
    return messages


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_of_one_is_one_of_all(asynchronous: bool, two_processes: Workers, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    first, second = two_processes.run(fail, str(path), asynchronous)
    no_checkpoint, no_place = (
        "InvalidArgumentError: there is no checkpoint at",
        "InvalidArgumentError: no checkpoint can",
    )
    assert first[0].startswith(f"TorchstratError: saving {path} failed on rank 1: InvalidArgumentError: the checkpoint")
    assert second[0].startswith("InvalidArgumentError: the checkpoint cannot be written")
    assert first[1].startswith("TorchstratError: restoring")
    assert f"failed on rank 1: {no_checkpoint}" in first[1]
    assert second[1].startswith(no_checkpoint)
    assert first[2].startswith(no_place)
    assert f"failed on rank 0: {no_place}" in second[2]
    assert first[3] == second[3]
    assert "own.weight is held by rank 1 alone, which does not see" in first[3]
    assert first[4] == second[4] == "", "who does not see the folder does not write"
    assert sorted(os.listdir(tmp_path)) == ["saved", "saved-next"]
    assert not (tmp_path / "saved-next" / "__1_0.distcp").exists()
    expected, job = Job(seed=0), Job()
    job.checkpoint.restore(path)
    assert same(job.values(), expected.values())
    job.checkpoint.restore(tmp_path / "saved-next")


def fail_and_ask_differently(path: str) -> list[str]:
    """Rank 0 asks the handle, rank 1 does not: the next save fails on both, and nobody waits for the other."""
    strategy = ts.MirroredStrategy()
    job, ended = Job(strategy), threading.Event()
    with held_writes(full=True) as held:
        held.go_on.set()
        handle = job.checkpoint.save(path, asynchronous=True)
        handle.add_done_callback(lambda _: ended.set())
        assert ended.wait(WAIT)
    asks = handle.result if strategy.is_chief else lambda: None
    messages = told(asks, lambda: job.checkpoint.save(path), lambda: job.checkpoint.save(path))
    strategy.close()
    return messages


def test_an_error_that_only_some_have_asked_for(two_processes: Workers, tmp_path: Path) -> None:
    first, second = two_processes.run(fail_and_ask_differently, str(tmp_path / "saved"))
    assert [bool(message) for message in first] == [True, True, False]
    assert "failed on rank 1" in first[1]
    assert [bool(message) for message in second] == [False, True, False]
    Job().checkpoint.restore(tmp_path / "saved")


ENDING = textwrap.dedent(
    """
    import sys, time
    import torch
    import torchstrat as ts
    from torchstrat.checkpoint import writing

    write = writing.write_part

    def slowly(*args):
        time.sleep(1.0)
        return write(*args)

    writing.write_part = slowly
    value = torch.arange(10.0)
    ts.Checkpoint(value=value).save(sys.argv[1], asynchronous=True)
    value.zero_()
    """
)


def test_a_program_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path / "saved")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    value = torch.zeros(10)
    Checkpoint(value=value).restore(tmp_path / "saved")
    assert torch.equal(value, torch.arange(10.0))


# -- the manager ------------------------------------------------------------------------------------------------------


def keep_two(directory: str) -> list[Any]:
    strategy = ts.MirroredStrategy()
    weight = torch.zeros(2)
    checkpoint = ts.Checkpoint(weight=weight)
    seen: list[Any] = []
    with ts.CheckpointManager(directory, max_to_keep=2) as manager:
        seen.append(manager.restore(checkpoint))
        for step in (1, 2, 3):
            weight.fill_(step)
            manager.save(checkpoint, step, asynchronous=step == 3)
        seen.append((manager.restore(checkpoint), weight[0].item()))
        if strategy.is_chief:
            flip(Path(directory, "step-00000003", "__0_0.distcp"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen.append((manager.restore(checkpoint), weight[0].item()))
        seen += [[(name in str(one.message)) for name in ("step-00000003", "is damaged")] for one in caught]
        manager.save(checkpoint, 3)
        seen.append([step for step, _ in manager.checkpoints])
    strategy.close()
    return seen


def test_a_manager_does_the_same_on_all_ranks(two_processes: Workers, tmp_path: Path) -> None:
    expected = [None, (3, 3.0), (2, 2.0), [True, True], [2, 3]]
    assert two_processes.run(keep_two, str(tmp_path)) == [expected, expected]
    left = {name for name in os.listdir(tmp_path) if not name.startswith(".")}
    assert left == {"step-00000002", "step-00000003", "step-00000003.aside"}


def be_second(directory: str) -> str:
    strategy = ts.MirroredStrategy()
    with ts.CheckpointManager(directory) as manager:
        [message] = told(lambda: manager.save(ts.Checkpoint(weight=torch.zeros(2)), 7))
    strategy.close()
    return message


def test_a_second_writer_fails_on_all_ranks(two_processes: Workers, tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        manager.save(ts.Checkpoint(weight=torch.zeros(2)), 1)
        first, second = two_processes.run(be_second, str(tmp_path))
        assert f"{tmp_path} is being written to by process {os.getpid()} on" in first
        assert "failed on rank 0" in second
        assert f"by process {os.getpid()} on" in second
        assert [step for step, _ in manager.checkpoints] == [1]
    assert two_processes.run(be_second, str(tmp_path)) == ["", ""]


# -- random numbers ---------------------------------------------------------------------------------------------------


def curve(devices: list[str] | None, seed: int, restore: str | None, save: str | None) -> list[list[float]]:
    """The losses of each replica of this process over three steps with dropout, after a restore or two other steps."""
    strategy = ts.MirroredStrategy(devices)
    if devices is None:  # ranks of one job may have seeds of their own
        seed += 10 * torch.distributed.get_rank()
    torch.manual_seed(seed)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    checkpoint = ts.Checkpoint(model=model, optimizer=optimizer)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(16, 4, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def steps(count: int) -> list[list[float]]:
        losses = [strategy.local_results(strategy.run(step)) for _ in range(count)]
        return [[loss.item() for loss in of_replica] for of_replica in zip(*losses, strict=True)]

    steps(2)
    if restore is not None:
        checkpoint.restore(restore)
    if save is not None:
        checkpoint.save(save)
    found = steps(3)
    strategy.close()
    return found


def draws_after(path: str) -> list[float]:
    """What a process draws beside its steps: before, here, and after a restore."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Linear(1, 1)
    random.seed(torch.distributed.get_rank())
    Checkpoint(model=model).restore(path)
    strategy.close()
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def test_more_processes_than_were_saved_draw_as_those_do(two_processes: Workers, tmp_path: Path) -> None:
    checkpoint = Checkpoint(model=nn.Linear(1, 1))
    checkpoint.save(tmp_path / "one")
    expected = [float(torch.rand(())), random.random(), float(np.random.rand())]
    assert two_processes.run(draws_after, str(tmp_path / "one")) == [expected, expected]


def test_the_curve_goes_on_here_and_elsewhere(two_processes: Workers, tmp_path: Path) -> None:
    """Two replicas in one process, and in two."""

    def in_two(*args: Any) -> list[list[float]]:
        return [one for found in two_processes.run(curve, None, *args) for one in found]

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    here = curve(["cpu:0", "cpu:1"], 7, None, one)
    assert here[0] != here[1]  # each replica has its own dropout
    assert in_two(99, one, None) == here
    there = in_two(5, None, two)
    assert there[0] != there[1]
    assert in_two(99, two, None) == there != here
    assert curve(["cpu:0", "cpu:1"], 99, two, None) == there
