"""`DistributedDataset` and `DistributedIterator`: ends, errors, and what runs ahead of whom."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchstrat as ts
from tests.unit.data_ranks import layout_in_process, plain
from torchstrat import data
from torchstrat.data import InputOptions
from torchstrat.data.prefetch import Ahead, Prefetcher
from torchstrat.errors import InvalidArgumentError, StrategyMixingError, UnsupportedError


def distribute(dataset: Any, replicas: int = 2, **options: Any) -> data.DistributedDataset:
    return data.distribute_dataset(None, layout_in_process(replicas), dataset, InputOptions(**options))  # type: ignore[arg-type]


def from_function(function: Any, replicas: int = 2, refused: bool = False, **options: Any) -> data.DistributedDataset:
    layout = layout_in_process(replicas, per_replica_input="refused" if refused else "honoured")
    return data.distribute_datasets_from_function(None, layout, function, InputOptions(**options))  # type: ignore[arg-type]


def components(batch: Any) -> list[Any]:
    return [plain(component) for component in batch.values]


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torchstrat-prefetch"]


class Recorder:
    """Two-row batches, made one by one; knows how many were made and by which threads."""

    def __init__(self, batches: int, failing: int | None = None) -> None:
        self.batches, self.failing = batches, failing
        self.made = 0
        self.threads: set[str] = set()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.batches):
            if index == self.failing:
                raise KeyError(f"batch {index}")
            self.made += 1
            self.threads.add(threading.current_thread().name)
            yield torch.arange(2) + 2 * index


def test_the_end() -> None:
    iterator = iter(distribute([torch.arange(2)]))
    assert iter(iterator) is iterator
    assert components(next(iterator)) == [[0], [1]]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(ts.OutOfRangeError, match=r"after the last of 1 element\(s\)"):
            iterator.get_next()
        assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(InvalidArgumentError, match="ask has_value"):
        iterator.get_next_as_optional().get_value()


def test_no_length_but_a_cardinality() -> None:
    dataset = distribute([torch.arange(2)] * 3)
    assert dataset.cardinality == 3
    assert bool(dataset)
    with pytest.raises(TypeError, match=r"use \.cardinality"):
        len(dataset)


def test_reduce_folds_over_one_pass() -> None:
    dataset = distribute(list(torch.arange(5).split(2)))
    assert dataset.reduce(0, lambda total, batch: total + sum(batch.batch_info.rows)) == 5


def test_iterating_in_another_strategys_scope_is_mixing() -> None:
    mine, other = (ts.MirroredStrategy(["cpu:0", "cpu:1"]) for _ in range(2))
    dataset = mine.distribute_dataset([torch.arange(2)])
    iterator = iter(dataset)
    with other.scope():
        with pytest.raises(StrategyMixingError):
            next(iterator)
        with pytest.raises(StrategyMixingError):
            iter(dataset)
    with mine.scope():
        assert components(next(iterator)) == [[0], [1]]


def test_a_replica_does_not_take_batches_itself() -> None:
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    iterator = iter(strategy.distribute_dataset([torch.arange(2)]))
    with pytest.raises(InvalidArgumentError, match="inside a replica of a run"):
        strategy.run(lambda: next(iterator))
    assert components(next(iterator)) == [[0], [1]]
    strategy.close()


def test_the_datasets_code_runs_when_it_is_asked_for_in_the_calling_thread() -> None:
    recorder = Recorder(4)
    iterator = iter(distribute(recorder))
    for step in range(4):
        assert recorder.made == step
        next(iterator)
    assert recorder.threads == {threading.current_thread().name}
    assert not prefetch_threads()


def test_a_larger_buffer_reads_ahead_in_the_background_and_no_further() -> None:
    recorder = Recorder(100)
    iterator = iter(distribute(recorder, per_replica_buffer_size=3))
    assert components(next(iterator)) == [[0], [1]]
    assert components(next(iterator)) == [[2], [3]]
    assert recorder.threads == {"torchstrat-prefetch"}
    iterator.close()
    assert 2 <= recorder.made <= 2 + 3
    assert next(iterator, None) is None


@pytest.mark.parametrize("buffer", [1, 3])
def test_an_error_arrives_in_its_turn_with_its_traceback(buffer: int) -> None:
    iterator = iter(distribute(Recorder(5, failing=2), per_replica_buffer_size=buffer))
    assert [components(next(iterator)) for _ in range(2)] == [[[0], [1]], [[2], [3]]]
    with pytest.raises(KeyError, match="batch 2") as caught:
        next(iterator)
    assert 'raise KeyError(f"batch {index}")' in "".join(traceback.format_tb(caught.tb))
    with pytest.raises(KeyError, match="batch 2"):
        next(iterator, None)
    assert not prefetch_threads()


def left_by_break() -> None:
    for _ in distribute(Recorder(100), per_replica_buffer_size=2):
        assert prefetch_threads()
        break


def left_by_collection() -> None:
    iterator = iter(distribute(Recorder(100), per_replica_buffer_size=2))
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)
    assert prefetch_threads()
    del iterator, cycle
    gc.collect()


def left_at_the_end() -> None:
    iterator = iter(distribute(Recorder(3), per_replica_buffer_size=2))
    assert len(list(iterator)) == 3
    assert not prefetch_threads()


@pytest.mark.parametrize("leave", [left_by_break, left_by_collection, left_at_the_end])
def test_no_thread_outlives_the_loop(leave: Any) -> None:
    leave()
    assert not prefetch_threads()


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            raise ValueError("item 2 is broken")
        return torch.tensor(index)


def test_a_workers_exception_arrives_with_its_traceback() -> None:
    iterator = iter(distribute(DataLoader(Broken(), batch_size=2, num_workers=1)))
    assert components(next(iterator)) == [[0], [1]]
    with pytest.raises(ValueError, match=r'in DataLoader worker process 0(.|\n)*raise ValueError\("item 2 is broken"'):
        next(iterator)
    del iterator
    gc.collect()  # the traceback that pytest kept holds the workers


def test_persistent_workers_start_over_when_a_loop_was_left() -> None:
    loader = DataLoader(range(6), batch_size=2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    dataset = distribute(loader)
    first = iter(dataset)
    next(first)
    assert [components(batch) for batch in dataset] == [[[0], [1]], [[2], [3]], [[4], [5]]]
    assert next(first, None) is None


def test_the_order_is_that_of_a_plain_loop_with_the_same_seed() -> None:
    def orders(wrap: Any) -> list[list[int]]:
        torch.manual_seed(3)
        loader = DataLoader(range(9), batch_size=4, shuffle=True)  # type: ignore[arg-type]
        found = []
        for _ in range(2):
            for batch in wrap(loader):
                parts = batch.values if isinstance(batch, ts.PerReplica) else (batch,)
                found.append(torch.cat(parts).tolist())
                torch.rand(3)  # the training step draws too
        return found

    assert orders(distribute) == orders(lambda loader: loader)


def test_copies_run_one_element_ahead_and_reading_stays_in_the_calling_thread() -> None:
    reading: list[str] = []
    copying: list[str] = []

    def source() -> Iterator[int]:
        for index in range(3):
            reading.append(threading.current_thread().name)
            yield index

    def copy(value: int) -> int:
        copying.append(threading.current_thread().name)
        return 10 * value

    prefetcher = Prefetcher(source(), copy, 1, Ahead.COPY)
    assert prefetcher.next() == 0
    assert len(reading) == 2
    assert [prefetcher.next(), prefetcher.next(), prefetcher.next(), prefetcher.next()] == [10, 20, None, None]
    assert set(reading) == {threading.current_thread().name}
    assert copying == ["torchstrat-prefetch"] * 3
    assert not prefetch_threads()


def test_a_function_gives_whole_elements_in_turn() -> None:
    contexts = []

    def dataset_fn(context: ts.InputContext) -> Any:
        contexts.append(context)
        return list(torch.arange(5).split(2))

    dataset = from_function(dataset_fn)
    assert contexts == [ts.InputContext(1, 0, 2)]
    assert [(components(batch), batch.batch_info.rows) for batch in dataset] == [
        ([[0, 1], [2, 3]], (2, 2)),
        ([[4], []], (1, 0)),
    ]
    assert dataset.cardinality == 2
    assert len(contexts) == 1


def test_unbatched_elements_that_are_left_over_are_not_lost() -> None:
    steps = [(components(batch), batch.batch_info.rows) for batch in from_function(lambda context: torch.arange(3))]
    assert steps == [([0, 1], (1, 1)), ([2, []], (1, 0))]


def test_a_pipeline_for_each_replica() -> None:
    streams = iter([[torch.zeros(1), torch.ones(1)], [torch.full((1,), 7.0)]])
    dataset = from_function(lambda context: next(streams), replication_mode=ts.InputReplicationMode.PER_REPLICA)
    assert [components(batch) for batch in dataset] == [[[0], [7]], [[1], []]]


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (lambda context: [1, 2, 3], {}, TypeError, "a list of int is no dataset"),
        (lambda context: None, {}, ValueError, "the dataset is None"),
        (lambda: [torch.zeros(1)], {}, TypeError, "positional argument"),
        ([torch.zeros(1)], {}, TypeError, "needs a function"),
        (lambda context: [torch.zeros(1)], {"place_dataset_on_device": True}, ValueError, "PER_REPLICA"),
    ],
)
def test_functions_and_options_that_do_not_fit(
    function: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_function(function, **options)


def test_a_mode_that_means_nothing() -> None:
    mode = ts.InputReplicationMode.PER_REPLICA
    with pytest.raises(UnsupportedError, match="for one dataset that is split"):
        distribute([torch.arange(2)], replication_mode=mode)
    with pytest.raises(UnsupportedError, match="with a single replica"):
        from_function(lambda context: [torch.arange(2)], replicas=1, refused=True, replication_mode=mode)
