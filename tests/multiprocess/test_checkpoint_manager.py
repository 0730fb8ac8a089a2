"""`ts.CheckpointManager` and the job's own state with one replica per process."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.checkpoints import flip
from torchstrat.checkpoint import job_state, writer_lock
from torchstrat.errors import TorchstratError
from torchstrat.testing import Workers

pytestmark = pytest.mark.multiprocess


# -- the manager ------------------------------------------------------------------------------------------------------


def keep_two(directory: str) -> list[Any]:
    strategy = ts.MirroredStrategy()
    weight = torch.zeros(2)
    checkpoint = ts.Checkpoint(weight=weight)
    told: list[Any] = []
    with ts.CheckpointManager(directory, max_to_keep=2) as manager:
        assert manager.restore(checkpoint) is None
        for step in (1, 2, 3):
            weight.fill_(step)
            manager.save(checkpoint, step, asynchronous=step == 3)
        weight.fill_(-1)
        told.append((manager.restore(checkpoint), weight[0].item()))
        if strategy.is_chief:
            [file] = (Path(directory) / "step-00000003").glob("__0_0.distcp")
            flip(file)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            told.append((manager.restore(checkpoint), weight[0].item()))
        told.append([str(one.message) for one in caught])
        weight.fill_(3)
        manager.save(checkpoint, 3)
        told.append([step for step, _ in manager.checkpoints])
    strategy.close()
    return told


def test_all_ranks_do_the_same(two_processes: Workers, tmp_path: Path) -> None:
    for told in two_processes.run(keep_two, str(tmp_path)):
        newest, older, warned, steps = told
        assert newest == (3, 3.0)
        assert older == (2, 2.0)
        assert len(warned) == 1
        assert "step-00000003" in warned[0]
        assert "is damaged" in warned[0]
        assert steps == [2, 3]
    left = {writer_lock.NAME, "step-00000002", "step-00000003", "step-00000003.aside"}
    assert set(os.listdir(tmp_path)) == left


def be_second(directory: str) -> str:
    strategy = ts.MirroredStrategy()
    manager = ts.CheckpointManager(directory)
    try:
        manager.save(ts.Checkpoint(weight=torch.zeros(2)), 7)
        return "saved"
    except TorchstratError as error:
        return str(error)
    finally:
        manager.close()
        strategy.close()


def test_a_second_writer_fails_on_all_ranks(two_processes: Workers, tmp_path: Path) -> None:
    with ts.CheckpointManager(tmp_path) as manager:
        manager.save(ts.Checkpoint(weight=torch.zeros(2)), 1)
        first, second = two_processes.run(be_second, str(tmp_path))
        assert f"{tmp_path} is being written to by process {os.getpid()} on" in first
        assert "failed on rank 0" in second
        assert f"by process {os.getpid()} on" in second
        assert [step for step, _ in manager.checkpoints] == [1]
    assert two_processes.run(be_second, str(tmp_path)) == ["saved", "saved"]


# -- random numbers ---------------------------------------------------------------------------------------------------


def curve(strategy: ts.Strategy, seed: int, restore: str | None, save: str | None) -> list[list[float]]:
    """The losses of each replica of this process over three steps with dropout, after a restore or two other steps."""
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
        return [[one.item() for one in strategy.local_results(strategy.run(step))] for _ in range(count)]

    steps(2)
    if restore is not None:
        checkpoint.restore(restore)
    if save is not None:
        checkpoint.save(save)
    return steps(3)


def on_a_rank(seed: int, restore: str | None, save: str | None, control: bool = False) -> list[float]:
    strategy = ts.MirroredStrategy()
    reads = job_state.reads
    if control:
        job_state.reads = lambda *_: job_state.Reads()
    try:
        # Ranks of one job may have seeds of their own.
        return [one for [one] in curve(strategy, seed + 10 * torch.distributed.get_rank(), restore, save)]
    finally:
        job_state.reads = reads
        strategy.close()


def in_process(seed: int, restore: str | None, save: str | None) -> list[list[float]]:
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    try:
        return [list(column) for column in zip(*curve(strategy, seed, restore, save), strict=True)]
    finally:
        strategy.close()


def test_the_curve_goes_on(two_processes: Workers, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    expected = two_processes.run(on_a_rank, 7, None, path)
    assert expected[0] != expected[1]  # each replica has its own dropout
    assert two_processes.run(on_a_rank, 99, path, None) == expected
    assert two_processes.run(on_a_rank, 99, path, None, True) != expected


def test_it_goes_on_elsewhere(two_processes: Workers, tmp_path: Path) -> None:
    """Two replicas in one process, and in two."""
    path = str(tmp_path / "saved")
    expected = in_process(7, None, path)
    assert two_processes.run(on_a_rank, 99, path, None) == expected
    other = str(tmp_path / "other")
    expected = two_processes.run(on_a_rank, 5, None, other)
    assert in_process(99, other, None) == expected
