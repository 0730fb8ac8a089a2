"""What a data set draws while it is read by two processes: its own for every row, and the same after a restore."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchstrat as ts
from torchstrat.testing import Workers

ROWS = 18
PASSES = 2
Values = list[list[list[float]]]
"""Of one process, by pass and step: the rows that it got, each with what was drawn for it."""
_of_the_script = np.random.default_rng(7)


class Noisy(Dataset[Any]):
    """Row ``i`` is ``i`` with a number of each generator that a data set may draw from."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(1)
        self.transform = Shift(random.Random(2))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [torch.rand(()).item(), random.random(), np.random.randn(), self.own.random(), _of_the_script.random()]
        return self.transform(torch.tensor([float(index), *drawn], dtype=torch.float64))


class Shift:
    def __init__(self, generator: random.Random) -> None:
        self.generator = generator

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return torch.cat([row, torch.tensor([self.generator.random()], dtype=torch.float64)])


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)
    np.random.randn()  # the second of a pair is waiting now
    _of_the_script.bit_generator.state = np.random.default_rng(7).bit_generator.state


def stand() -> Any:
    streams = (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=False)))
    return *streams, repr(_of_the_script.bit_generator.state)


def put(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def read(
    kept: bytes | None = None, cut: tuple[int, int] | None = None, buffer: int = 1
) -> tuple[Values, bytes, Any, list[int]]:
    """In a process: the rest of ``PASSES`` passes, or what is there up to step ``cut[1]`` of pass ``cut[0]``; what a
    checkpoint keeps then; where the streams stand."""
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    seed(3 if kept is None else 4)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    dataset = strategy.distribute_dataset(loader, ts.InputOptions(per_replica_buffer_size=buffer))
    passes, steps = (PASSES, None) if cut is None else (cut[0] + 1, cut[1])
    if kept is not None:
        state, streams, done = pickle.loads(kept)
        dataset.load_state_dict(state)
        put(streams)
        passes -= done
    try:
        found: Values = []
        for number in range(passes):
            batches = iter(dataset)
            last = steps if number == passes - 1 else None
            found.append([row for batch in itertools.islice(batches, last) for row in batch.values[0].tolist()])
        streams = (torch.get_rng_state(), random.getstate(), np.random.get_state())
        keep = pickle.dumps((dataset.state_dict(), streams, passes - 1))
        assert isinstance(loader.dataset, Noisy)
        generators = [loader.dataset.own.bit_generator.state, loader.dataset.transform.generator.getstate()]
        return found, keep, (stand(), repr(generators)), [len(rows) for rows in found]
    finally:
        strategy.close()


def read_by_workers() -> tuple[list[list[float]], Any]:
    """In a process: its rows of one pass, with what the data set's generators gave, which a worker has copies of."""
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    seed(3)
    data = Noisy()
    try:
        loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
        batches = strategy.distribute_dataset(loader)
        rows = [[row[0], *row[4:]] for batch in batches for row in batch.values[0].tolist()]
        return rows, (stand(), repr(data.own.bit_generator.state), data.transform.generator.getstate())
    finally:
        strategy.close()


def test_workers_of_both_processes_have_generators_of_their_own(two_processes: Workers) -> None:
    (first, first_stand), (second, second_stand) = two_processes.run(read_by_workers)
    columns = list(zip(*first, *second, strict=True))
    assert sorted(columns[0]) == [*range(ROWS)]
    assert [len(set(column)) for column in columns[1:]] == [ROWS] * 3
    assert first_stand == second_stand


def test_every_row_of_both_processes_has_draws_of_its_own(two_processes: Workers) -> None:
    (first, _, first_stand, _), (second, _, second_stand, _) = two_processes.run(read)
    rows = [row for found in (first, second) for one_pass in found for row in one_pass]
    columns = list(zip(*rows, strict=True))
    assert sorted(columns[0]) == sorted([*range(ROWS)] * PASSES)
    assert [len(set(column)) for column in columns[1:]] == [ROWS * PASSES] * 6
    assert first_stand == second_stand, "what later draws see must not depend on the rank"
    (again, *_), _ = two_processes.run(read)
    assert again == first, "equal seeds give equal numbers"


def test_the_streams_of_the_process_are_put_back(two_processes: Workers) -> None:
    def after(fn: Callable[[], Any]) -> Any:
        seed(3)
        fn()
        return stand()

    plain = after(lambda: [list(range(1)) for _ in DataLoader(range(ROWS), 4, shuffle=True)])  # type: ignore[arg-type]
    [(_, _, (found, _), _), _] = two_processes.run(read, None, (0, 99))
    assert found[:3] == plain[:3], "the order is drawn, and nothing else"


@pytest.mark.parametrize("cut", [(0, 2), (1, 0), (1, 3)])
def test_the_draws_are_the_same_after_a_restore(two_processes: Workers, cut: tuple[int, int]) -> None:
    whole = two_processes.run(read)
    before = two_processes.run(read, None, cut)
    after = two_processes.run(read, before[0][1])
    for (expected, *_), (start, *_), (rest, *_) in zip(whole, before, after, strict=True):
        assert [*start[:-1], start[-1] + rest[0], *rest[1:]] == expected


def test_a_buffer_is_read_in_the_thread_that_asks(two_processes: Workers) -> None:
    assert [found for found, *_ in two_processes.run(read, None, None, 3)] == [
        found for found, *_ in two_processes.run(read)
    ]


class Told:
    """Writes down in which process it was collected."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write("the parent\n" if self.pid == os.getpid() else "a child\n")

    pid = property(lambda self: int(self.path.name))


class Collects(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return super().__getitem__(index)


def collected_in(folder: Path) -> str:
    path = folder / str(os.getpid())
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    gc.disable()
    try:
        Told(path)
        for _ in strategy.distribute_dataset(DataLoader(Collects(), 6, num_workers=1, multiprocessing_context="fork")):
            pass
        gc.collect()
        return path.read_text()
    finally:
        gc.enable()
        strategy.close()


def test_data_loading_workers_collect_no_garbage_of_their_parent(two_processes: Workers, tmp_path: Path) -> None:
    assert two_processes.run(collected_in, tmp_path) == ["the parent\n"] * 2
