"""A row that one of two processes cannot read: the other one is told which rank failed, and why."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchstrat as ts
from torchstrat.testing import Workers

STRATEGIES = {"mirrored": ts.MirroredStrategy, "central": ts.CentralStorageStrategy}


class Damaged(Dataset[Any]):
    def __init__(self, damaged: int) -> None:
        self.damaged = damaged

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.damaged:
            raise ValueError(f"row {index} is damaged")
        return torch.ones(1)


def go_through(name: str, damaged: int, workers: int, trains: bool) -> tuple[int, list[str], float]:
    """Steps, the errors of three attempts to go on after the first, and the time it took."""
    strategy = STRATEGIES[name](timeout=timedelta(seconds=240))
    with strategy.scope():
        layer = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step(batch: torch.Tensor) -> None:
        layer(batch).sum().backward()
        optimizer.step()

    errors: list[str] = []
    steps, started = 0, time.monotonic()
    batches = iter(strategy.distribute_dataset(DataLoader(Damaged(damaged), 4, num_workers=workers)))
    while len(errors) < 3:
        try:
            batch = next(batches)
            if trains:
                strategy.run(step, args=(batch,))
            steps += 1
        except StopIteration:
            break
        except (ValueError, ts.errors.CommunicationError) as error:
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
    took = time.monotonic() - started
    strategy.close()
    return steps, errors, took


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damaged", [9, 23])
@pytest.mark.parametrize("name", STRATEGIES)
def test_who_only_reads_is_told_at_the_end(two_processes: Workers, name: str, damaged: int, workers: int) -> None:
    found = two_processes.run(go_through, name, damaged, workers, False)
    failing = 0 if damaged == 9 else 1
    (steps, errors, _), (others_steps, told, took) = found[failing], found[1 - failing]
    assert (steps, others_steps) == (damaged // 4, 6)
    assert (len(errors), len(told)) == (3, 3)
    start = "Caught ValueError in DataLoader worker process 0" if workers else f"row {damaged} is damaged"
    assert errors[0].startswith(f"ValueError: {start}")
    assert all(error.startswith(f"ValueError: row {damaged}") or "ValueError: Caught" in error for error in errors)
    assert all(f"rank {failing} could not read its rows of a batch: ValueError" in error for error in told)
    assert took < 120


@pytest.mark.parametrize("name", STRATEGIES)
def test_who_trains_is_told_where_it_waits(two_processes: Workers, name: str) -> None:
    (steps, errors, _), (others_steps, told, took) = two_processes.run(go_through, name, 9, 0, True)
    assert (steps, others_steps) == (2, 2)
    assert errors == ["ValueError: row 9 is damaged"] * 3
    assert "replica 0 its input failed in next(distributed_iterator): ValueError: row 9 is damaged" in told[0]
    assert took < 120


def pass_after_pass() -> list[int]:
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    dataset = strategy.distribute_dataset(DataLoader(Damaged(-1), 4))
    counts = [sum(1 for _ in zip(range(last), dataset, strict=False)) for last in (1, 99, 2, 99, 99)]
    strategy.close()
    return counts


def test_loops_that_are_left_early_hold_nobody_up(two_processes: Workers) -> None:
    assert two_processes.run(pass_after_pass) == [[1, 6, 2, 6, 6]] * 2
