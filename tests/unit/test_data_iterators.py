"""`DistributedDataset` and `DistributedIterator`: ends, errors, and what runs ahead of whom."""

from __future__ import annotations

import gc
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

import torchstrat as ts
from tests.support.datasets import Numbers
from tests.support.input_ranks import components, distribute, distribute_from_function, layout_in_process, on_ranks
from torchstrat.data import InputLayout
from torchstrat.errors import ContextError, InvalidArgumentError, StrategyMixingError, UnsupportedError

PER_REPLICA = ts.InputReplicationMode.PER_REPLICA


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
    dataset = distribute([torch.arange(2)])
    assert bool(dataset)
    iterator = iter(dataset)
    assert components(next(iterator)) == [[0], [1]]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(ts.OutOfRangeError, match=r"after the last of 1 element\(s\)"):
            iterator.get_next()
        assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(InvalidArgumentError, match="ask has_value"):
        iterator.get_next_as_optional().get_value()


def test_what_is_refused_takes_no_batch() -> None:
    mine, other = (ts.MirroredStrategy(["cpu:0", "cpu:1"]) for _ in range(2))
    dataset = mine.distribute_dataset([torch.arange(2)])
    iterator = iter(dataset)
    with other.scope():
        for take in (next, lambda _: iter(dataset)):
            with pytest.raises(StrategyMixingError):
                take(iterator)
    with pytest.raises(InvalidArgumentError, match="inside a replica of a run"):
        mine.run(lambda: next(iterator))
    with mine.scope():
        assert components(next(iterator)) == [[0], [1]]
    mine.close()


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
    assert [components(next(iterator)) for _ in range(2)] == [[[0], [1]], [[2], [3]]]
    assert recorder.threads == {"torchstrat-prefetch"}
    iterator.close()
    assert 2 <= recorder.made <= 2 + 3
    assert next(iterator, None) is None


def test_copies_run_one_element_ahead_and_reading_stays_in_the_calling_thread() -> None:
    copying: list[str] = []

    class Copying:
        copies = True

        def place(self, step: Any) -> tuple[Any, tuple[Any, ...]]:
            copying.append(threading.current_thread().name)
            return step, ()

        def receive(self, placed: tuple[Any, tuple[Any, ...]]) -> Any:
            return placed[0]

    recorder = Recorder(3)
    iterator = iter(distribute(recorder, layout_in_process(2, placement=Copying())))
    assert components(next(iterator)) == [[0], [1]]
    assert recorder.made == 2
    assert [components(batch) for batch in iterator] == [[[2], [3]], [[4], [5]]]
    assert next(iterator, None) is None
    assert recorder.threads == {threading.current_thread().name}
    assert copying == ["torchstrat-prefetch"] * 3
    assert not prefetch_threads()


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


class Broken(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            raise ValueError("item 2 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_row_is_not_the_end_of_the_data(workers: int) -> None:
    iterator = iter(distribute(DataLoader(Broken(4), batch_size=2, num_workers=workers)))
    assert components(next(iterator)) == [[0], [1]]
    for _ in range(3):
        with pytest.raises(ValueError, match="item 2 is broken") as caught:
            next(iterator)
        text = "".join(traceback.format_exception(caught.value))
        assert 'raise ValueError("item 2 is broken")' in text
        assert ("in DataLoader worker process 0" in text) == bool(workers)
    del iterator, caught
    gc.collect()  # the traceback that pytest kept holds the workers


class Interrupted(Numbers):
    waits = True

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2 and self.waits:
            self.waits = False
            raise KeyboardInterrupt
        return super().__getitem__(index)


@pytest.mark.parametrize("buffer", [1, 3])
def test_ctrl_c_is_not_the_end_of_the_data(buffer: int) -> None:
    dataset = distribute(DataLoader(Interrupted(6), batch_size=2), per_replica_buffer_size=buffer)
    iterator = iter(dataset)
    assert components(next(iterator)) == [[0], [1]]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    for _ in range(2):
        with pytest.raises(ContextError, match=r"KeyboardInterrupt interrupted next.*load_state_dict"):
            next(iterator)
    dataset.load_state_dict(iterator.state_dict())
    assert [components(batch) for batch in dataset] == [[[2], [3]], [[4], [5]]]


def test_what_another_thread_closes_meanwhile_is_at_its_end() -> None:
    iterator = iter(distribute(Recorder(3), per_replica_buffer_size=2))
    found: list[Any] = []

    def closed_before() -> Future[object]:
        iterator.close()
        return Future()

    with mock.patch("torchstrat.data.prefetch.Future", closed_before):
        reader = threading.Thread(target=lambda: found.extend(iterator), daemon=True)
        reader.start()
        reader.join(10)
    assert not reader.is_alive()
    assert found == []


def left_by_break(loader: Any) -> None:
    for _ in distribute(loader, per_replica_buffer_size=2):
        assert prefetch_threads()
        break


def left_by_collection(loader: Any) -> None:
    iterator = iter(distribute(loader, per_replica_buffer_size=2))
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)
    assert prefetch_threads()
    del iterator, cycle
    gc.collect()


def left_at_the_end(loader: Any) -> None:
    iterator = iter(distribute(loader, per_replica_buffer_size=2))
    assert len(list(iterator)) == 10
    assert not prefetch_threads()


@pytest.mark.parametrize("leave", [left_by_break, left_by_collection, left_at_the_end])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_thread_and_no_worker_outlives_the_loop(leave: Callable[[Any], None], workers: int) -> None:
    leave(DataLoader(Numbers(20), batch_size=2, num_workers=workers) if workers else Recorder(10))
    assert not prefetch_threads()
    for child in torch.multiprocessing.active_children():
        child.join(30)  # its end may be under way
    assert not torch.multiprocessing.active_children()


def test_persistent_workers_start_over_when_a_loop_was_left() -> None:
    dataset = distribute(DataLoader(Numbers(6), batch_size=2, num_workers=1, persistent_workers=True))
    first = iter(dataset)
    next(first)
    assert [components(batch) for batch in dataset] == [[[0], [1]], [[2], [3]], [[4], [5]]]
    assert next(first, None) is None


# -- functions that make a dataset, of which more is recorded in tests/conformance ---


def test_unbatched_elements_of_a_function_that_are_left_over_are_not_lost() -> None:
    contexts: list[ts.InputContext] = []
    made = distribute_from_function(lambda context: contexts.append(context) or torch.arange(3))
    steps = [(components(batch), batch.batch_info.rows) for batch in made]
    assert steps == [([0, 1], (1, 1)), ([2, []], (1, 0))]
    assert made.cardinality == 2
    assert contexts == [ts.InputContext(1, 0, 2)]


def test_a_pipeline_for_each_replica() -> None:
    streams = iter([[torch.zeros(1), torch.ones(1)], [torch.full((1,), 7.0)]])
    dataset = distribute_from_function(lambda context: next(streams), replication_mode=PER_REPLICA)
    assert [components(batch) for batch in dataset] == [[[0], [7]], [[1], []]]
    with pytest.raises(UnsupportedError, match="for one dataset that is split"):
        distribute([torch.arange(2)], replication_mode=PER_REPLICA)
    refused = layout_in_process(1, per_replica_input="refused")
    with pytest.raises(UnsupportedError, match="with a single replica"):
        distribute_from_function(lambda context: [torch.arange(2)], refused, replication_mode=PER_REPLICA)


def _without_some(rows: list[Any]) -> torch.Tensor | None:
    kept = [row for row in rows if row not in (2, 3, 4, 5, 9)]
    return torch.stack(kept) if kept else None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_that_is_none_is_one_without_rows_and_not_the_end(ranks: int) -> None:
    loader = DataLoader(Numbers(12), batch_size=1 + (ranks == 1), collate_fn=_without_some)

    def read(layout: InputLayout) -> list[Any]:
        def shard(context: ts.InputContext) -> Any:
            return itertools.islice(loader, context.input_pipeline_id, None, ranks)

        steps = list(distribute_from_function(shard, layout))
        return [None if batch is None else (components(batch), batch.batch_info.rows) for batch in steps]

    if ranks == 1:
        assert read(layout_in_process(2)) == [([[0, 1], []], (2, 0)), ([[], [6, 7]], (0, 2)), ([[8], [10, 11]], (1, 2))]
        assert read(layout_in_process(1, always_wrap=True))[1:3] == [None, None]
        return
    first, second = on_ranks(ranks, read)[0]
    assert first == [([[0]], (1, 1)), None, None, ([[6]], (1, 1)), ([[8]], (1, 0)), ([[10]], (1, 1))]
    assert second == [([[1]], (1, 1)), None, None, ([[7]], (1, 1)), ([[]], (1, 0)), ([[11]], (1, 1))]
