"""What a data set draws while two processes read it: its own for every row, and the same after a restore."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
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
from tests.support import datasets
from torchstrat.data import SHARD_HINT, ArrayDataset, TextLineDataset
from torchstrat.testing import Workers

ROWS = 12
GLOBAL_BATCH = 4
Rows = list[list[float]]
"""Each row is a number and what was drawn for it."""
_of_the_script = np.random.default_rng(7)


def draws() -> list[float]:
    assert threading.current_thread() is threading.main_thread(), "streams that others draw from are put aside"
    return [torch.rand(()).item(), random.random(), np.random.randn(), _of_the_script.random()]


def noisy(number: Any, *others: float) -> torch.Tensor:
    return torch.tensor([float(number), *draws(), *others], dtype=torch.float64)


class Shift:
    def __init__(self) -> None:
        self.generator = random.Random(2)


class Noisy(Dataset[Any]):
    """Has generators of its own, one within what it has."""

    def __init__(self, rows: range = range(ROWS)) -> None:
        self.rows, self.own, self.transform = rows, np.random.default_rng(1), Shift()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return noisy(self.rows[index], self.own.random(), self.transform.generator.random())

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
        self.files, self.batch, self.own = files, batch, np.random.default_rng(1)

    def open(self, files: Sequence[Any]) -> Iterator[torch.Tensor]:
        # Its own affair, as these files are; but workers take turns in one order.
        order = random.sample(range(6), 6) if get_worker_info() is None else range(6)
        for path in files:
            lines = Path(path).read_text().split()
            found = [noisy(lines[row], self.own.random()) for row in order]
            yield from torch.stack(found).split(self.batch) if self.batch else found

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise AssertionError("the files of this process are opened")


class DrawsAtOnce(Sampler[int]):
    """Shards by an order that all processes draw alike, as soon as it is opened."""

    def __init__(self, context: ts.InputContext) -> None:
        self.first, self.step = context.input_pipeline_id, context.num_input_pipelines

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ROWS)[self.first :: self.step].tolist())


def loader(data: Any, workers: int, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data, GLOBAL_BATCH, num_workers=workers, **settings)


class Own(DataLoader[Any]):
    """Has an iterator of its own, which starts its workers when it is first asked."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


class Around:
    """Hands on what a loader gives."""

    def __init__(self, given: DataLoader[Any]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)


def own(data: Any, **settings: Any) -> Own:
    return Own(data, GLOBAL_BATCH, num_workers=2, **settings)


Distribute = Callable[[ts.Strategy, int, Path, int], Any]


def from_function(make: Callable[[ts.InputContext, int], Any]) -> Distribute:
    return lambda strategy, workers, folder, buffer: strategy.distribute_datasets_from_function(
        lambda context: make(context, workers), ts.InputOptions(per_replica_buffer_size=buffer)
    )


def under(policy: str, make: Callable[[int, list[Path]], Any]) -> Distribute:
    return lambda strategy, workers, folder, buffer: strategy.distribute_dataset(
        make(workers, sorted(folder.iterdir())),
        ts.InputOptions(auto_shard_policy=policy, per_replica_buffer_size=buffer),
    )


def lines(files: list[Path]) -> Any:
    return TextLineDataset(files).map(noisy)


def hinted(seed: int | None = 1) -> Any:
    return ArrayDataset(torch.arange(ROWS)).shuffle(ROWS, seed).shard(SHARD_HINT, SHARD_HINT).map(noisy)


def shared(context: ts.InputContext) -> Any:
    rows = ArrayDataset(torch.arange(ROWS)).shuffle(ROWS)
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id).map(noisy)


def part(context: ts.InputContext) -> Noisy:
    return Noisy(range(context.input_pipeline_id, ROWS, context.num_input_pipelines))


def by_sampler(context: ts.InputContext, workers: int, **settings: Any) -> DataLoader[Any]:
    return loader(Noisy(), workers, sampler=DrawsAtOnce(context), **settings)


_LOADERS: dict[str, Distribute] = {
    "DATA, rows": under("DATA", lambda workers, _: loader(Noisy(), workers, shuffle=True)),
    "OFF, rows": under("OFF", lambda workers, _: loader(Noisy(), workers, shuffle=True)),
    "HINT, rows": under("HINT", lambda workers, _: loader(Noisy(), workers, shuffle=True)),
    "HINT, pipeline": under("HINT", lambda workers, _: loader(hinted(), workers)),
    "FILE, own files": under("FILE", lambda workers, files: loader(NoisyFiles(files), workers)),
    "FILE, lines": under("FILE", lambda workers, files: loader(lines(files), workers)),
    "function, rows": from_function(lambda context, workers: loader(part(context), workers, shuffle=True)),
    "function, own sampler": from_function(by_sampler),
}
_ALONE: dict[str, Distribute] = {
    "OFF, batches": under("OFF", lambda *_: NoisyBatches()),
    "HINT, pipeline": under("HINT", lambda *_: hinted().batch(GLOBAL_BATCH)),
    "FILE, own files": under("FILE", lambda _, files: NoisyFiles(files, 2)),
    "FILE, lines": under("FILE", lambda _, files: lines(files).batch(GLOBAL_BATCH)),
    "FILE, lines read ahead": under("FILE", lambda _, files: lines(files).batch(GLOBAL_BATCH).prefetch(2)),
    "function, batches": from_function(lambda *_: NoisyBatches()),
    "function, pipeline": from_function(lambda context, _: shared(context).batch(GLOBAL_BATCH)),
}
CASES: dict[str, tuple[Distribute, int]] = {
    **{f"{name}, {workers} workers": (make, workers) for name, make in _LOADERS.items() for workers in (0, 2)},
    **{f"{name}, no loader": (make, 0) for name, make in _ALONE.items()},
    "function, shuffled pipeline, 2 workers": (
        from_function(lambda context, workers: loader(shared(context), workers)),
        2,
    ),
    "HINT, shuffled pipeline, persistent workers": (
        under("HINT", lambda workers, _: loader(hinted(seed=None), workers, persistent_workers=True)),
        2,
    ),
    "function, own sampler, persistent workers": (
        from_function(lambda *made: by_sampler(*made, persistent_workers=True)),
        2,
    ),
}
CASES |= {
    name: (make, 2)
    for name, make in {
        "OFF, rows by an own iterator": under("OFF", lambda *_: own(Noisy(), shuffle=True)),
        "function, own sampler, own iterator": from_function(
            lambda context, _: own(Noisy(), sampler=DrawsAtOnce(context), persistent_workers=True)
        ),
        "function, shuffled pipeline, own iterator": from_function(lambda context, _: own(shared(context))),
        "function, around a loader": from_function(lambda context, _: Around(loader(part(context), 2, shuffle=True))),
    }.items()
}
ONE_WORKER = "DATA, rows, 1 worker"
UNORDERED: dict[str, Distribute] = {
    "function, rows, in any order": from_function(
        lambda context, workers: loader(part(context), workers, shuffle=True, in_order=False)
    ),
    "function, shuffled pipeline, in any order": from_function(
        lambda context, workers: loader(shared(context), workers, in_order=False)
    ),
}


def seed(value: int) -> None:
    datasets.seed(value)
    _of_the_script.bit_generator.state = np.random.default_rng(7).bit_generator.state


def stand() -> str:
    return datasets.stand() + repr(_of_the_script.bit_generator.state)


def read(
    name: str,
    folder: Path,
    passes: int = 2,
    kept: bytes | None = None,
    last: int | None = None,
    buffer: int = 1,
    apart: bool = False,
) -> tuple[list[Rows], str, bytes]:
    """In a process: its rows by pass, of the last one the first ``last`` steps; where the streams stand then, and what
    a checkpoint keeps."""
    if name in UNORDERED:
        distribute, workers = UNORDERED[name], 2
    else:
        distribute, workers = CASES[name] if name in CASES else (_LOADERS["DATA, rows"], 1)
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    seed(4 if apart and not strategy.is_chief else 3)
    dataset = distribute(strategy, workers, folder, buffer)
    if kept is not None:
        state, streams, done = pickle.loads(kept)
        dataset.load_state_dict(state)
        datasets.put_streams(streams)
        passes -= done
    found: list[Rows] = []
    try:
        for number in range(passes):
            steps = itertools.islice(iter(dataset), last if number == passes - 1 else None)
            found.append([row for step in steps for row in step.values[0].tolist()])
        return found, stand(), pickle.dumps((dataset.state_dict(), datasets.streams(), passes - 1))
    finally:
        strategy.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(2):
        (tmp_path / str(number)).write_text("\n".join(map(str, range(6 * number, 6 * number + 6))))
    return tmp_path


WITH_WORKERS = [name for name, (_, workers) in CASES.items() if workers]


@pytest.mark.parametrize(
    # Of those with workers every second one, of each way to shard; all in soak.
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in WITH_WORKERS[::2] else []) for name in CASES],
)
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
    if "sampler" in name:
        assert [row[0] for row in first[0]] != [row[0] for row in first[1]]
    assert first_stand == second_stand, "what later draws see must not depend on the rank"
    assert two_processes.run(read, name, folder)[0][0] == found[0][0], "equal seeds give equal numbers"


def test_one_worker_of_each_process_has_generators_of_its_own(two_processes: Workers, folder: Path) -> None:
    ([first], first_stand, _), ([second], second_stand, _) = two_processes.run(read, ONE_WORKER, folder, 1)
    columns = list(zip(*first, *second, strict=True))
    assert sorted(columns[0]) == [*range(ROWS)]
    assert [len(set(column)) for column in columns[1:]] == [ROWS] * 6
    assert first_stand == second_stand


@pytest.mark.parametrize("name", UNORDERED)
def test_no_draw_is_repeated_where_workers_need_not_wait(two_processes: Workers, folder: Path, name: str) -> None:
    (first, first_stand, _), (second, second_stand, _) = two_processes.run(read, name, folder)
    for one, other in zip(first, second, strict=True):
        assert sorted(row[0] for row in one + other) == [*range(ROWS)]
    columns = list(zip(*(row[1:4] for one_pass in first + second for row in one_pass), strict=True))
    assert [len(set(column)) for column in columns] == [2 * ROWS] * 3
    assert first_stand == second_stand, "what later draws see must not depend on the rank"


CUTS = ((1, 2), (2, 0), (2, 2))
WITHOUT_WORKERS = [name for name in CASES if not CASES[name][1]]
RESTORED = [
    # Where a pass is cut, and what draws, are of no concern to each other: by turns always, each with each in soak.
    pytest.param(name, cut, marks=[] if number % len(CUTS) == turn else pytest.mark.soak)
    for number, name in enumerate(WITHOUT_WORKERS)
    for turn, cut in enumerate(CUTS)
] + [pytest.param("function, shuffled pipeline, 2 workers", (1, 2))]


@pytest.mark.parametrize(("name", "cut"), RESTORED)
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


def test_the_streams_of_the_process_are_put_back(two_processes: Workers, folder: Path) -> None:
    seed(3)
    for _ in DataLoader(range(ROWS), GLOBAL_BATCH, shuffle=True):  # type: ignore[arg-type]
        pass
    [(_, found, _), _] = two_processes.run(read, "DATA, rows, 0 workers", folder, 1)
    assert found.startswith(datasets.stand()), "the order is drawn, and nothing else"


def test_workers_of_the_first_pipeline_draw_what_they_do_in_plain_pytorch(two_processes: Workers, folder: Path) -> None:
    seed(3)
    plain = [row for batch in loader(Noisy(), 2, shuffle=True) for row in batch.tolist()]
    assert two_processes.run(read, "OFF, rows, 2 workers", folder, 1)[0][0] == [plain]


@pytest.mark.parametrize("name", ["OFF, rows, 0 workers", "OFF, rows, 2 workers", "FILE, lines, no loader"])
def test_ranks_that_are_seeded_apart_stay_apart(two_processes: Workers, folder: Path, name: str) -> None:
    first, second = found = [rows for [rows], *_ in two_processes.run(read, name, folder, 1, None, None, 1, True)]
    assert not {row[1] for row in first} & {row[1] for row in second}
    assert [rows for [rows], *_ in two_processes.run(read, name, folder, 1, None, None, 1, True)] == found


class Shards(IterableDataset[Any]):
    """Shards itself by an order that all processes draw alike."""

    def __init__(self, context: ts.InputContext, augments: bool) -> None:
        self.first, self.step, self.augments = context.input_pipeline_id, context.num_input_pipelines, augments

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        turn, turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            torch.manual_seed(worker.seed - worker.id)
        for number in torch.randperm(ROWS)[self.first :: self.step][turn::turns].tolist():
            yield torch.stack([noisy(number) if self.augments else torch.tensor([float(number)])])


SHARDS: dict[str, Callable[[Any], Any]] = {
    "NoLoader": lambda shards: shards,
    "InProcess": lambda shards: DataLoader(shards, None),
    "InWorkers": lambda shards: DataLoader(shards, None, num_workers=2),
    "OneBatchOfEachWorker": lambda shards: DataLoader(shards, 3, num_workers=2, persistent_workers=True),
    "ByAnOwnIterator": lambda shards: Own(shards, None, num_workers=2),
    "OneBatchByAnOwnIterator": lambda shards: Own(shards, 3, num_workers=2),
}
"""By a name for the data set: what reads it."""


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchstrat.data").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("torchstrat.data").removeHandler(handler)


def read_shards(augments: bool, name: str) -> tuple[list[float], list[str]]:
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    kind = type(name, (Shards,), {})  # each kind is told of once
    seed(3)

    def make(context: ts.InputContext) -> Any:
        return SHARDS[name](kind(context, augments))

    try:
        with listening() as told:
            dataset = strategy.distribute_datasets_from_function(make)
            steps = [step for _ in range(2) for step in dataset]
            return [row[0] for step in steps for row in step.values[0].flatten(0, -2).tolist()], told
    finally:
        strategy.close()


@pytest.mark.parametrize("name", SHARDS)
def test_what_shards_itself_draws_as_the_others_and_is_told_of(two_processes: Workers, name: str) -> None:
    for augments in False, True:
        (first, told), (second, nothing) = two_processes.run(read_shards, augments, name)
        assert sorted(first + second) == sorted([*range(ROWS)] * 2), "no row is lost or repeated"
        expected = f"{name} draws from the process's random streams"
        assert [text.split(" while")[0] for text in told] == [expected] * augments
        assert not nothing


SHUFFLED = [(0, None), (0, 1), (2, None), (2, 1)]


def orders_of_files(folder: Path) -> list[list[list[str]]]:
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    found = []
    seed(3)
    try:
        for workers, own_seed in SHUFFLED:
            rows = TextLineDataset(sorted(folder.iterdir())).shuffle(ROWS, own_seed)
            given = loader(rows, workers, persistent_workers=workers > 0)
            dataset = strategy.distribute_dataset(given, ts.InputOptions(auto_shard_policy="FILE"))
            assert dataset.element_spec, "which reads a row, in no pass"
            found.append([[row for step in dataset for row in step.values[0].tolist()] for _ in range(3)])
        return found
    finally:
        strategy.close()


def test_files_of_ones_own_are_shuffled_anew_in_every_pass(two_processes: Workers, folder: Path) -> None:
    for number, of_rank in enumerate(two_processes.run(orders_of_files, folder)):
        own = sorted((folder / str(number)).read_text().split())
        for passes in of_rank:
            assert [sorted(rows) for rows in passes] == [own] * 3
            assert len({tuple(rows) for rows in passes}) == 3
        alone = TextLineDataset(folder / str(number)).shuffle(ROWS, 1)
        assert of_rank[SHUFFLED.index((0, 1))] == [list(alone) for _ in range(3)]


class Early(Own):
    """Starts its workers when it is made, and lets them go on from pass to pass."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.begun = DataLoader.__iter__(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return itertools.islice(self.begun, 1)


def read_early() -> list[str]:
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    try:
        with listening() as told:
            for data in range(ROWS), Noisy():  # of which one cannot draw
                made: Any = Early(data, GLOBAL_BATCH, num_workers=1)
                given = strategy.distribute_datasets_from_function(lambda context, made=made: made)
                assert sum(len(list(given)) for _ in range(2)) == 2
            return told
    finally:
        strategy.close()


def test_workers_that_were_started_before_are_told_of(two_processes: Workers) -> None:
    nothing, [told] = two_processes.run(read_early)
    assert told.startswith("Early has workers that were started before it was iterated here")
    assert not nothing


class Told:
    """Writes down in which process it was collected."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write("the parent\n" if self.path.name == str(os.getpid()) else "a child\n")


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
        for _ in strategy.distribute_dataset(loader(Collects(), 1)):
            pass
        gc.collect()
        return path.read_text()
    finally:
        gc.enable()
        strategy.close()


def test_data_loading_workers_collect_no_garbage_of_their_parent(two_processes: Workers, tmp_path: Path) -> None:
    assert two_processes.run(collected_in, tmp_path) == ["the parent\n"] * 2
