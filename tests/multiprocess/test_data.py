"""Input over real processes: every row once, the order of one process, ends and failures that nobody waits for."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import torchstrat as ts
from torchstrat.testing import Workers

ROWS = 11
EPOCHS = 2
SEED_OF_RANK_ZERO = 5
Epoch = list[tuple[list[list[int]], tuple[int, ...]]]
"""Per step: each local replica's row numbers, and the rows of every replica of the group."""


class Rows(Dataset[Any]):
    """Item ``i`` is ``(i, [i, 10 i])``; for a list of indices, the batch of those items. Records what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: Any) -> Any:
        self.fetched.extend(index if isinstance(index, list) else [index])
        row = torch.as_tensor(index)
        return row, torch.stack([row, 10 * row], dim=-1)


class Batches(Dataset[Any]):
    """Item ``i`` is a batch of ``i + 1`` rows, made by the dataset."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = torch.arange(index + 1) + 10 * index
        return rows, torch.stack([rows, 10 * rows], dim=-1)


class Reversed(Sampler[int]):
    """A sampler that nobody knows, with random draws from the process's own stream while it is iterated."""

    def __iter__(self) -> Iterator[int]:
        for row in reversed(range(ROWS)):
            yield row if torch.rand(()) < 0.5 else ROWS - 1 - row


class GrowingBatches:
    """A batch sampler that is no subclass of anything, in an order that depends on the process's random stream."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(ROWS).tolist()
        for size in (1, 2, 3, 5):
            yield [order.pop() for _ in range(size)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: DataLoader(Rows(), batch_size=4),
    "shuffle": lambda: DataLoader(Rows(), batch_size=4, shuffle=True),
    "shuffle with a generator": lambda: DataLoader(Rows(), batch_size=4, shuffle=True, generator=generator()),
    "drop_last": lambda: DataLoader(Rows(), batch_size=4, shuffle=True, drop_last=True),
    "with replacement": lambda: DataLoader(
        Rows(), batch_size=4, sampler=RandomSampler(Rows(), replacement=True, num_samples=ROWS)
    ),
    "subset": lambda: DataLoader(Rows(), batch_size=4, sampler=SubsetRandomSampler([1, 3, 5, 7, 9])),
    "weighted": lambda: DataLoader(
        Rows(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 5 + [3.0] * (ROWS - 5), num_samples=9)
    ),
    "custom sampler": lambda: DataLoader(Rows(), batch_size=4, sampler=Reversed()),
    "custom batch sampler": lambda: DataLoader(Rows(), batch_sampler=GrowingBatches()),  # type: ignore[arg-type]
    "no batching": lambda: DataLoader(Batches(), batch_size=None, shuffle=True),
    "bulk loading": lambda: DataLoader(
        Rows(), batch_size=None, sampler=BatchSampler(RandomSampler(Rows()), batch_size=4, drop_last=False)
    ),
    "shuffle in a worker": lambda: DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1),
    "custom sampler in workers": lambda: DataLoader(Rows(), batch_size=2, sampler=Reversed(), num_workers=2),
    "persistent workers": lambda: DataLoader(
        Rows(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "batches smaller than the group": lambda: DataLoader(Rows(), batch_size=1, sampler=SequentialSampler(Rows())),
}
READ_BY = {2: list(LOADERS), 3: ["shuffle", "drop_last", "custom batch sampler", "batches smaller than the group"]}
"""By number of processes. What three share out otherwise than two are incomplete batches."""
ONCE_PER_EPOCH = {
    "sequential", "shuffle", "shuffle with a generator", "custom batch sampler", "bulk loading", "shuffle in a worker",
    "persistent workers", "batches smaller than the group",
}  # fmt: skip


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for part in lists for item in part]


def strategy() -> ts.Strategy:
    return ts.MirroredStrategy(timeout=timedelta(seconds=240))


def epoch(dataset: Any) -> Epoch:
    steps = []
    for batch in dataset:
        rows, pairs = batch if isinstance(batch, tuple | list) else (batch, None)
        local = [component.tolist() for component in rows.values]
        if pairs is not None:
            assert [[[row, 10 * row] for row in component] for component in local] == [p.tolist() for p in pairs.values]
        steps.append((local, rows.batch_info.rows))
    return steps


def read_all(names: list[str]) -> dict[str, Any]:
    """In a process: these loaders, in an order that is rank 0's although ranks are seeded differently."""
    running = strategy()
    try:
        found = {}
        for name in names:
            torch.manual_seed(SEED_OF_RANK_ZERO if running.is_chief else 1234)
            dataset = running.distribute_dataset(LOADERS[name]())
            found[name] = [epoch(dataset) for _ in range(EPOCHS)]
        return found
    finally:
        running.close()


@pytest.fixture(scope="module")
def three_processes() -> Iterator[Workers]:
    with Workers(3, timeout_seconds=300) as workers:
        yield workers


@pytest.fixture(scope="module")
def readings(two_processes: Workers, three_processes: Workers) -> dict[int, list[dict[str, list[Epoch]]]]:
    """By number of processes, by rank: what each loader gave. One process runs as many replicas itself."""
    groups = {2: two_processes, 3: three_processes}
    return {size: groups[size].run(read_all, names) for size, names in READ_BY.items()}


def in_one_process(name: str, replicas: int) -> list[Epoch]:
    running = ts.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])
    torch.manual_seed(SEED_OF_RANK_ZERO)
    dataset = running.distribute_dataset(LOADERS[name]())
    try:
        return [epoch(dataset) for _ in range(EPOCHS)]
    finally:
        running.close()


def plain_batches(name: str) -> list[list[list[int]]]:
    torch.manual_seed(SEED_OF_RANK_ZERO)
    loader = LOADERS[name]()
    return [[rows.tolist() for rows, _ in loader] for _ in range(EPOCHS)]


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in READ_BY.items() for name in names])
def test_processes_see_the_global_batches_of_one_process(
    name: str, size: int, readings: dict[int, list[dict[str, list[Epoch]]]]
) -> None:
    epochs_of_group = []
    for epochs in zip(*(found[name] for found in readings[size]), strict=True):
        steps = []
        for parts in zip(*epochs, strict=True):
            assert len({rows for _, rows in parts}) == 1, "ranks disagree about the rows of a step"
            local = [component for components, _ in parts for component in components]
            assert tuple(map(len, local)) == parts[0][1]
            steps.append((local, parts[0][1]))
        epochs_of_group.append(steps)
    assert epochs_of_group == in_one_process(name, size)
    batches = [[joined(local) for local, _ in steps] for steps in epochs_of_group]
    assert batches == plain_batches(name)
    if name in ONCE_PER_EPOCH:
        assert all(sorted(joined(steps)) == list(range(ROWS)) for steps in batches)


def fetch_sequentially() -> list[int]:
    running = strategy()
    loader = DataLoader(Rows(), batch_size=4)
    try:
        for _ in running.distribute_dataset(loader):
            pass
        assert isinstance(loader.dataset, Rows)
        return loader.dataset.fetched
    finally:
        running.close()


def test_a_process_fetches_its_own_rows_only(two_processes: Workers) -> None:
    assert two_processes.run(fetch_sequentially) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10]]


class Failing(Rows):
    def __getitem__(self, index: Any) -> Any:
        if index == 6:
            raise ValueError("row 6 is broken")
        return super().__getitem__(index)


def read_failing() -> str:
    running = strategy()
    try:
        for _ in running.distribute_dataset(DataLoader(Failing(), batch_size=4, num_workers=1)):
            pass
    except (ValueError, ts.errors.CommunicationError) as error:
        return "".join(traceback.format_exception(error))
    finally:
        running.close()
    return "nothing was raised"


def test_a_workers_exception_arrives_with_its_traceback(two_processes: Workers) -> None:
    sound, failing = two_processes.run(read_failing)
    assert "CommunicationError: rank 1 could not read its rows of a batch: ValueError" in sound
    assert "row 6 is broken" in failing
    assert "in DataLoader worker process 0" in failing
    assert 'raise ValueError("row 6 is broken")' in failing


class Noise(Rows):
    def __getitem__(self, index: Any) -> Any:
        return torch.rand(())


def read_noise() -> tuple[list[float], list[int]]:
    running = strategy()
    torch.manual_seed(3)
    try:
        loader = DataLoader(Noise(), batch_size=4, shuffle=True, num_workers=1)
        values = [value for batch in running.distribute_dataset(loader) for value in batch.values[0].tolist()]
        return values, torch.get_rng_state().tolist()
    finally:
        running.close()


def test_workers_of_different_ranks_augment_differently_from_equal_seeds(two_processes: Workers) -> None:
    (first, first_state), (second, second_state) = two_processes.run(read_noise)
    assert not set(first) & set(second)
    assert first_state == second_state, "what later draws see must not depend on the rank"


def leave_early() -> tuple[list[str], int]:
    gc.collect()  # an exception that PyTorch raised again for a worker keeps itself, and the workers, till then
    running = strategy()
    try:
        loader = DataLoader(Rows(), batch_size=2, num_workers=2)
        for _ in running.distribute_dataset(loader, ts.InputOptions(per_replica_buffer_size=2)):
            break
        names = [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]
        for child in torch.multiprocessing.active_children():
            child.join(30)  # its end may be under way
        return names, len(torch.multiprocessing.active_children())
    finally:
        running.close()


def test_leaving_the_loop_early_leaves_nothing_behind(two_processes: Workers) -> None:
    assert two_processes.run(leave_early) == [([], 0)] * 2


def read_uneven(counts: list[int]) -> Epoch:
    running = strategy()

    def dataset_fn(context: ts.InputContext) -> list[torch.Tensor]:
        rank = context.input_pipeline_id
        return [torch.full((2,), 10 * rank + step) for step in range(counts[rank])]

    try:
        return epoch(running.distribute_datasets_from_function(dataset_fn))
    finally:
        running.close()


def test_uneven_ends_keep_all_processes_stepping(three_processes: Workers) -> None:
    found = three_processes.run(read_uneven, [1, 3, 0])
    assert [rows for _, rows in found[0]] == [(2, 2, 0), (0, 2, 0), (0, 2, 0)]
    assert found[0] == [([[0, 0]], (2, 2, 0)), ([[]], (0, 2, 0)), ([[]], (0, 2, 0))]
    assert [local for local, _ in found[1]] == [[[10, 10]], [[11, 11]], [[12, 12]]]
    assert [local for local, _ in found[2]] == [[[]]] * 3


class Stream(IterableDataset[Any]):
    """``rows`` rows from ``first`` on, in batches of two."""

    def __init__(self, first: int, rows: int = 6) -> None:
        self.first, self.rows = first, rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(self.first, self.first + self.rows).split(2)


def read_stream(differ: bool, policy: str) -> Any:
    running = strategy()
    stream = Stream(0 if running.is_chief or not differ else 100)
    options = ts.InputOptions(auto_shard_policy=policy)
    try:
        return epoch(running.distribute_dataset(DataLoader(stream, batch_size=None), options))
    except ValueError as error:
        return str(error)
    finally:
        running.close()


def test_an_iterable_is_read_by_all_and_split(two_processes: Workers) -> None:
    first, second = two_processes.run(read_stream, False, "DATA")
    assert [local for local, _ in first] == [[[0]], [[2]], [[4]]]
    assert [local for local, _ in second] == [[[1]], [[3]], [[5]]]


def test_an_iterable_that_differs_between_ranks_is_refused(two_processes: Workers) -> None:
    for message in two_processes.run(read_stream, True, "AUTO"):
        assert "rank(s) [1] read another first batch than rank 0" in message
        assert "auto_shard_policy=AutoShardPolicy.OFF" in message


def test_what_is_sharded_already_is_left_alone_under_off(two_processes: Workers) -> None:
    first, second = two_processes.run(read_stream, True, "OFF")
    assert [local for local, _ in first] == [[[row]] for row in range(6)]
    assert [local for local, _ in second] == [[[row]] for row in range(100, 106)]
    assert {rows for _, rows in first + second} == {(1, 1)}


def read_files(paths: list[str], hinted: bool) -> list[list[str]]:
    running = strategy()
    lines: ts.data.Pipeline = ts.data.TextLineDataset(paths)
    if hinted:
        lines = lines.shard(ts.data.SHARD_HINT, ts.data.SHARD_HINT)
    options = ts.InputOptions(auto_shard_policy="HINT" if hinted else "AUTO")
    try:
        return [batch.values[0].tolist() for batch in running.distribute_dataset(lines.batch(2), options)]
    finally:
        running.close()


@pytest.fixture
def text_files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{index}.txt" for index in range(3)]
    for index, path in enumerate(paths):
        path.write_text("".join(f"{index}-{line}\n" for line in range(3)), encoding="utf-8")
    return [str(path) for path in paths]


def test_files_are_shared_by_file(two_processes: Workers, text_files: list[str]) -> None:
    first, second = two_processes.run(read_files, text_files, False)
    assert joined(first) == ["0-0", "0-1", "0-2", "2-0", "2-1", "2-2"]
    assert joined(second) == ["1-0", "1-1", "1-2"]
    assert len(first) == len(second)


def test_a_hint_says_where_to_shard(two_processes: Workers, text_files: list[str]) -> None:
    first, second = two_processes.run(read_files, text_files, True)
    assert joined(first) == ["0-0", "0-2", "1-1", "2-0", "2-2"]
    assert joined(second) == ["0-1", "1-0", "1-2", "2-1"]
