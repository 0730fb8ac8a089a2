"""What a data set draws where each of two equally seeded processes reads a pipeline of its own."""

from __future__ import annotations

import itertools
import logging
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

import torchstrat as ts
from torchstrat.data import SHARD_HINT, ArrayDataset, TextLineDataset, own_draws
from torchstrat.testing import Workers

ROWS = 12
GLOBAL_BATCH = 4
Rows = list[list[float]]
"""Each row is a number and what was drawn for it."""
_of_the_script = np.random.default_rng(7)


def draws() -> list[float]:
    assert threading.current_thread() is threading.main_thread(), "streams that others draw from are put aside"
    return [torch.rand(()).item(), random.random(), np.random.randn(), _of_the_script.random()]


def noisy(number: Any) -> torch.Tensor:
    return torch.tensor([float(number), *draws()], dtype=torch.float64)


class Noisy(Dataset[Any]):
    def __init__(self, rows: range = range(ROWS)) -> None:
        self.rows = rows
        self.own = np.random.default_rng(1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([noisy(self.rows[index]), torch.tensor([self.own.random()], dtype=torch.float64)])

    def shard(self, shards: int, index: int) -> Noisy:
        return Noisy(self.rows[index::shards])


class NoisyBatches(Noisy):
    def __len__(self) -> int:
        return len(self.rows) // GLOBAL_BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * GLOBAL_BATCH
        return torch.stack([super(NoisyBatches, self).__getitem__(row) for row in range(start, start + GLOBAL_BATCH)])


class NoisyFiles(IterableDataset[Any]):
    """Its elements are rows, or batches of them."""

    def __init__(self, files: Sequence[Any], batch: int = 0) -> None:
        self.files, self.batch = files, batch
        self.own = np.random.default_rng(1)

    def open(self, files: Sequence[Any]) -> Iterator[torch.Tensor]:
        # Its own affair, as these files are; but workers take turns in one order.
        order = random.sample(range(6), 6) if get_worker_info() is None else range(6)
        for path in files:
            lines = Path(path).read_text().split()
            found = [torch.cat([noisy(lines[row]), torch.tensor([self.own.random()])]) for row in order]
            yield from torch.stack(found).split(self.batch) if self.batch else found

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise AssertionError("the files of this process are opened")


def loader(data: Any, workers: int, **settings: Any) -> DataLoader[Any]:
    context = "fork" if workers else None
    return DataLoader(data, GLOBAL_BATCH, num_workers=workers, multiprocessing_context=context, **settings)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


Distribute = Callable[[ts.Strategy, int, Path, int], Any]


def from_function(make: Callable[[ts.InputContext, int, Path], Any]) -> Distribute:
    return lambda strategy, workers, folder, buffer: strategy.distribute_datasets_from_function(
        lambda context: make(context, workers, folder), ts.InputOptions(per_replica_buffer_size=buffer)
    )


def under(policy: str, make: Callable[[int, Path], Any]) -> Distribute:
    return lambda strategy, workers, folder, buffer: strategy.distribute_dataset(
        make(workers, folder), ts.InputOptions(auto_shard_policy=policy, per_replica_buffer_size=buffer)
    )


def lines(folder: Path) -> Any:
    return TextLineDataset(files(folder)).map(noisy)


def hinted() -> Any:
    return ArrayDataset(torch.arange(ROWS)).shuffle(ROWS, seed=1).shard(SHARD_HINT, SHARD_HINT).map(noisy)


def shared(context: ts.InputContext) -> Any:
    rows = ArrayDataset(torch.arange(ROWS)).shuffle(ROWS)
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id).map(noisy)


def part(context: ts.InputContext) -> Noisy:
    return Noisy(range(context.input_pipeline_id, ROWS, context.num_input_pipelines))


_LOADERS: dict[str, Distribute] = {
    "OFF, rows": under("OFF", lambda workers, _: loader(Noisy(), workers, shuffle=True)),
    "HINT, rows": under("HINT", lambda workers, _: loader(Noisy(), workers, shuffle=True)),
    "HINT, pipeline": under("HINT", lambda workers, _: loader(hinted(), workers)),
    "FILE, own files": under("FILE", lambda workers, folder: loader(NoisyFiles(files(folder)), workers)),
    "FILE, lines": under("FILE", lambda workers, folder: loader(lines(folder), workers)),
    "function, rows": from_function(lambda context, workers, _: loader(part(context), workers, shuffle=True)),
}
_ALONE: dict[str, Distribute] = {
    "OFF, batches": under("OFF", lambda *_: NoisyBatches()),
    "HINT, pipeline": under("HINT", lambda *_: hinted().batch(GLOBAL_BATCH)),
    "FILE, own files": under("FILE", lambda _, folder: NoisyFiles(files(folder), 2)),
    "FILE, lines": under("FILE", lambda _, folder: lines(folder).batch(GLOBAL_BATCH)),
    "FILE, lines read ahead": under("FILE", lambda _, folder: lines(folder).batch(GLOBAL_BATCH).prefetch(2)),
    "function, batches": from_function(lambda *_: NoisyBatches()),
    "function, pipeline": from_function(lambda context, *_: shared(context).batch(GLOBAL_BATCH)),
}
CASES: dict[str, tuple[Distribute, int]] = {
    **{f"{name}, {workers} workers": (make, workers) for name, make in _LOADERS.items() for workers in (0, 2)},
    **{f"{name}, no loader": (make, 0) for name, make in _ALONE.items()},
}


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)
    np.random.randn()  # the second of a pair is waiting now
    _of_the_script.bit_generator.state = np.random.default_rng(7).bit_generator.state


def stand() -> Any:
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return pickle.dumps([streams[0].tolist(), streams[1], repr(streams[2]), repr(_of_the_script.bit_generator.state)])


def read(
    name: str, folder: Path, passes: int = 2, kept: bytes | None = None, last: int | None = None, buffer: int = 1
) -> tuple[list[Rows], Any, bytes]:
    """In a process: its rows by pass, of the last one the first ``last`` steps; where the streams stand then, and what
    a checkpoint keeps."""
    distribute, workers = CASES[name]
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    seed(3)
    dataset = distribute(strategy, workers, folder, buffer)
    if kept is not None:
        state, streams, done = pickle.loads(kept)
        dataset.load_state_dict(state)
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        np.random.set_state(streams[2])
        passes -= done
    found: list[Rows] = []
    try:
        for number in range(passes):
            steps = itertools.islice(iter(dataset), last if number == passes - 1 else None)
            found.append([row for step in steps for row in step.values[0].tolist()])
        streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
        return found, stand(), pickle.dumps((dataset.state_dict(), streams, passes - 1))
    finally:
        strategy.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(2):
        (tmp_path / str(number)).write_text("\n".join(map(str, range(6 * number, 6 * number + 6))))
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_no_draw_is_repeated_by_another_pipeline(two_processes: Workers, folder: Path, name: str) -> None:
    (first, first_stand, _), (second, second_stand, _) = found = two_processes.run(read, name, folder)
    whole = "batches" in name or "OFF" in name
    numbers = sorted([*range(ROWS)] * (2 if whole else 1))
    for one, other in zip(first, second, strict=True):
        assert sorted(row[0] for row in one + other) == numbers, "orders that all draw alike stay alike"
    columns = list(zip(*(row[1:] for one_pass in first + second for row in one_pass), strict=True))
    if CASES[name][1]:  # of other generators than the process's, the workers of a process have equal copies
        columns = columns[:3]
    assert [len(set(column)) for column in columns] == [len(numbers) * 2] * len(columns)
    assert first_stand == second_stand, "what later draws see must not depend on the rank"
    assert two_processes.run(read, name, folder)[0][0] == found[0][0], "equal seeds give equal numbers"


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name][1]])
@pytest.mark.parametrize("cut", [(1, 2), (2, 2)])
def test_the_draws_are_the_same_after_a_restore(
    two_processes: Workers, folder: Path, name: str, cut: tuple[int, int]
) -> None:
    whole = two_processes.run(read, name, folder)
    before = two_processes.run(read, name, folder, cut[0], None, cut[1])
    after = two_processes.run(read, name, folder, 2, before[0][2])
    for (expected, *_), (start, *_), (rest, *_) in zip(whole, before, after, strict=True):
        assert [*start[:-1], start[-1] + rest[0], *rest[1:]] == expected
    assert [found for found, *_ in two_processes.run(read, name, folder, 2, None, None, 3)] == [
        found for found, *_ in whole
    ], "a buffer is read in the thread that asks"


def read_by_first_workers() -> Rows:
    """In a process: the rows of one pass under OFF, loaded by two workers."""
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    seed(3)
    try:
        dataset = strategy.distribute_dataset(
            loader(Noisy(), 2, shuffle=True), ts.InputOptions(auto_shard_policy="OFF")
        )
        return [row for step in dataset for row in step.values[0].tolist()]
    finally:
        strategy.close()


def test_workers_of_the_first_pipeline_draw_what_they_do_in_plain_pytorch(two_processes: Workers) -> None:
    seed(3)
    plain = [row for batch in loader(Noisy(), 2, shuffle=True) for row in batch.tolist()]
    assert two_processes.run(read_by_first_workers)[0] == plain


class DrawsAtOnce(Sampler[int]):
    """Shards by an order that all processes draw alike, as soon as it is opened."""

    def __init__(self, context: ts.InputContext) -> None:
        self.first, self.step = context.input_pipeline_id, context.num_input_pipelines

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ROWS)[self.first :: self.step].tolist())


def read_by_sampler(workers: int, persistent: bool) -> tuple[list[list[float]], Any]:
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    seed(3)

    def make(context: ts.InputContext) -> Any:
        return loader(Noisy(), workers, sampler=DrawsAtOnce(context), persistent_workers=persistent)

    try:
        dataset = strategy.distribute_datasets_from_function(make)
        passes = [[row[0] for step in dataset for row in step.values[0].tolist()] for _ in range(3)]
        del dataset
        return passes, stand()
    finally:
        strategy.close()


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_what_samplers_draw_stays_common(two_processes: Workers, workers: int, persistent: bool) -> None:
    (first, first_stand), (second, second_stand) = two_processes.run(read_by_sampler, workers, persistent)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == [*range(ROWS)]
    assert len({tuple(one) for one in first}) == 3
    assert first_stand == second_stand


class Shards(IterableDataset[Any]):
    """Shards itself by an order that all processes draw alike."""

    def __init__(self, context: ts.InputContext, augments: bool) -> None:
        self.first, self.step, self.augments = context.input_pipeline_id, context.num_input_pipelines, augments

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(ROWS)[self.first :: self.step].tolist():
            yield torch.stack([noisy(number) if self.augments else torch.tensor([float(number)])])


def read_shards(augments: bool, in_loader: bool) -> tuple[list[float], list[str]]:
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    own_draws.tell_of_common_draws.cache_clear()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchstrat.data").addHandler(handler)
    seed(3)

    def make(context: ts.InputContext) -> Any:
        shards = Shards(context, augments)
        return DataLoader(shards, batch_size=None) if in_loader else shards

    try:
        dataset = strategy.distribute_datasets_from_function(make)
        return [row[0] for _ in range(2) for step in dataset for row in step.values[0].tolist()], told
    finally:
        logging.getLogger("torchstrat.data").removeHandler(handler)
        strategy.close()


@pytest.mark.parametrize("in_loader", [False, True])
def test_what_shards_itself_draws_as_the_others_and_is_told_of(two_processes: Workers, in_loader: bool) -> None:
    for augments in False, True:
        (first, told), (second, nothing) = two_processes.run(read_shards, augments, in_loader)
        assert sorted(first + second) == sorted([*range(ROWS)] * 2), "no row is lost or repeated"
        assert [text.split(" while")[0] for text in told] == [
            "Shards draws from the process's random streams"
        ] * augments
        assert not nothing


def read_seeded_by_rank(name: str, folder: Path) -> Rows:
    distribute, workers = CASES[name]
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    seed(3 + torch.distributed.get_rank())
    try:
        dataset = distribute(strategy, workers, folder, 1)
        return [row for step in dataset for row in step.values[0].tolist()]
    finally:
        strategy.close()


@pytest.mark.parametrize("name", ["OFF, rows, 0 workers", "OFF, rows, 2 workers", "FILE, lines, no loader"])
def test_ranks_that_are_seeded_apart_stay_apart(two_processes: Workers, folder: Path, name: str) -> None:
    first, second = found = two_processes.run(read_seeded_by_rank, name, folder)
    assert not {row[1] for row in first} & {row[1] for row in second}
    assert two_processes.run(read_seeded_by_rank, name, folder) == found
