"""Several processes' input, with a thread and an in-memory communicator for each rank.

What each rank gets under each policy, of numbers and of files, is recorded in tests/conformance.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler, default_collate

from tests.support.datasets import Numbers, Stream
from tests.support.input_ranks import components, distribute, distribute_from_function, joined, on_ranks
from torchstrat import data
from torchstrat.data import InputLayout
from torchstrat.errors import CommunicationError, InvalidArgumentError, UnsupportedError

Steps = list[tuple[list[Any], tuple[int, ...]]]
LENGTH, INDICES = "the length of a dataset", "the indices of the next batches"


def steps_of(dataset: Any) -> Steps:
    return [(components(batch), batch.batch_info.rows) for batch in dataset]


def read(dataset: Any, workers: int, local: int = 1, **options: Any) -> tuple[list[Any], list[list[str]]]:
    """Each rank's steps (or its exception), and what it asked of the others. ``dataset``: or a function of the rank."""

    def work(layout: InputLayout) -> Steps:
        made = dataset(layout.worker_index) if callable(dataset) else dataset
        return steps_of(distribute(made, layout, **options))

    results, group = on_ranks(workers, work, local)
    return results, group.calls


def read_of_function(function: Any, workers: int) -> list[Any]:
    """``function``: of the rank."""

    def work(layout: InputLayout) -> Steps:
        return steps_of(distribute_from_function(lambda context: function(context.input_pipeline_id), layout))

    return on_ranks(workers, work)[0]


def in_steps(results: list[Steps]) -> list[list[Any]]:
    """The rows of each step over all ranks."""
    return [joined(part for parts, _ in of_ranks for part in parts) for of_ranks in zip(*results, strict=True)]


def by_rank(results: list[Steps]) -> list[list[Any]]:
    """The rows of each rank, which has one replica."""
    return [joined(parts[0] for parts, _ in steps) for steps in results]


# -- rows that are shared by index ------------------------------------------------------------------------------------


@pytest.mark.parametrize("collate", ["batch", "rows"])
def test_reading_whole_batches_is_said_once(collate: str, caplog: pytest.LogCaptureFixture) -> None:
    def collate_fn(samples: list[Any]) -> Any:
        return 2 * default_collate(samples)

    collate_fn.__qualname__ = f"doubled_by_{collate}"
    loader = DataLoader(Numbers(10), batch_size=4, collate_fn=collate_fn)
    with caplog.at_level(logging.WARNING, "torchstrat.data"):
        for _ in range(2):
            assert in_steps(read(loader, 2, collate=collate)[0]) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert len(caplog.records) == (collate == "batch")
    message = "the collate function doubled_by_batch may look at the whole batch"
    assert all(message in one.message for one in caplog.records)


@pytest.mark.parametrize(("workers", "local"), [(2, 1), (3, 1), (2, 2)])
def test_ranks_share_a_loader_by_index(workers: int, local: int) -> None:
    datasets = [Numbers(10) for _ in range(workers)]
    results, calls = read(lambda rank: DataLoader(datasets[rank], batch_size=4), workers, local)
    assert in_steps(results) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len({tuple(rows for _, rows in steps) for steps in results}) == 1
    for steps, dataset in zip(results, datasets, strict=True):
        own = [row for parts, _ in steps for part in parts for row in part]
        assert set(own) <= set(dataset.fetched)
        assert len(dataset.fetched) <= len(own) + len(steps)  # one more where a rank has no rows, for its shape
    if workers * local == 2:
        assert [dataset.fetched for dataset in datasets] == [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]
    assert all(call == [LENGTH] for call in calls)


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9, -1, -1))


@pytest.mark.parametrize("kind", [set, deque, iter, np.array])
def test_batches_of_indices_may_be_any_iterables(kind: Callable[[list[int]], Any]) -> None:
    indices: Any = [kind(batch) for batch in ([0, 1, 2, 3], [4, 5, 6])]
    assert in_steps(read(DataLoader(Numbers(10), batch_sampler=indices), 2)[0]) == [[0, 1, 2, 3], [4, 5, 6]]


class Opened(Numbers):
    """A file for each row."""

    files = tuple("0123456789")

    def open(self, file: str) -> Any:
        return super().__getitem__(int(file))

    def __getitem__(self, index: int) -> Any:
        return self.open(self.files[index])


def test_a_map_style_data_set_with_files_keeps_its_order() -> None:
    loader = DataLoader(Opened(10), batch_size=4, sampler=Backwards())
    assert in_steps(read(loader, 2)[0]) == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
    for error in read(loader, 2, auto_shard_policy="FILE")[0]:
        with pytest.raises(InvalidArgumentError, match=r"no map-style Dataset.* Use DATA"):
            raise error


class _Forbidden(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("only rank 0's sampler may be drawn from")


class _Failing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise KeyError("sampler")


class _Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(10)


def test_what_ranks_say_to_each_other_about_an_order() -> None:
    """An order of torch's is drawn again by each, without a word in a step. Another is told step by step, as it may
    follow what the steps do, between a word when it is opened and one that this was all."""
    results, calls = read(DataLoader(Numbers(60), batch_size=2, shuffle=True), 2)
    assert len(results[0]) == 30
    assert calls[0] == [LENGTH, "the state of the sampler's random stream"]

    samplers = [Backwards(), _Forbidden()]
    results, calls = read(lambda rank: DataLoader(Numbers(10), batch_size=3, sampler=samplers[rank]), 2)
    assert in_steps(results) == [[9, 8, 7], [6, 5, 4], [3, 2, 1], [0]]
    assert calls[1] == [LENGTH, *[INDICES] * 6]

    of_length: list[Callable[[int], Sampler[int]]] = [
        lambda count: RandomSampler(range(10), num_samples=count),
        lambda count: RandomSampler(range(count), num_samples=5),
        lambda count: SequentialSampler(range(count)),
    ]
    for sampler in of_length:

        def of_another_length(rank: int, sampler: Any = sampler) -> DataLoader[Any]:
            return DataLoader(Numbers(10), batch_size=5, sampler=sampler(5 * (rank + 1)))

        results, calls = read(of_another_length, 2)
        assert calls[0] == [LENGTH, *[INDICES] * 3]
        assert len(results[0]) == len(results[1]) == 1


def test_an_endless_sampler() -> None:
    def work(layout: InputLayout) -> Steps:
        dataset = distribute(DataLoader(Numbers(10), batch_size=4, sampler=_Endless()), layout)
        return steps_of(batch for batch, _ in zip(dataset, range(50), strict=False))

    assert in_steps(on_ranks(2, work)[0])[49] == [6, 7, 8, 9]


# -- pipelines that are read by all, or by each -----------------------------------------------------------------------


@pytest.mark.parametrize("as_batches", [False, True])
def test_iterables_are_read_in_full_and_compared_once(as_batches: bool, caplog: pytest.LogCaptureFixture) -> None:
    dataset: Any = list(torch.arange(6).split(4)) if as_batches else DataLoader(Stream(6), batch_size=4)
    with caplog.at_level(logging.WARNING, "torchstrat.data"):
        results, calls = read(dataset, 3)
    assert [[parts for parts, _ in steps] for steps in results] == [[[[0, 1]], [[4]]], [[[2, 3]], [[5]]], [[[]], [[]]]]
    assert calls[0] == ["the checksum of the first batch"]
    assert len(caplog.records) == (0 if as_batches else 1)


def test_off_gives_every_rank_everything_in_rotated_sizes() -> None:
    results, _ = read([torch.arange(4), torch.arange(4, 8)], 3, auto_shard_policy="OFF")
    assert by_rank(results) == [list(range(8))] * 3
    assert [[rows for _, rows in steps] for steps in results] == [[(2, 1, 1), (1, 1, 2), (1, 2, 1)] * 2] * 3


def test_what_is_sharded_already_is_left_alone_under_off() -> None:
    results, _ = read(lambda rank: DataLoader(Stream(6, 100 * rank), batch_size=2), 2, auto_shard_policy="OFF")
    assert by_rank(results) == [list(range(6)), list(range(100, 106))]
    assert {rows for steps in results for _, rows in steps} == {(1, 1)}


def test_data_that_ends_earlier_on_some_ranks() -> None:
    found = read_of_function(lambda rank: [torch.full((2,), 10 * rank + step) for step in range((1, 3, 0)[rank])], 3)
    rows = [(2, 2, 0), (0, 2, 0), (0, 2, 0)]
    assert found[0] == list(zip([[[0, 0]], [[]], [[]]], rows, strict=True))
    assert found[1] == list(zip([[[10, 10]], [[11, 11]], [[12, 12]]], rows, strict=True))
    assert found[2] == list(zip([[[]]] * 3, rows, strict=True))


class Shards(Numbers):
    def __init__(self, rows: list[int]) -> None:
        super().__init__(len(rows))
        self.rows = rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.rows[index])

    def shard(self, shards: int, index: int) -> Shards:
        return type(self)(self.rows[index::shards])


class ShardsOfBatches(Shards):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index).reshape(1)


class ShardedStream(Stream):
    def shard(self, shards: int, index: int) -> list[torch.Tensor]:
        return [torch.arange(self.rows)[index::shards]]


EIGHT = list(range(8))


@pytest.mark.parametrize(
    ("dataset", "shares"),
    [
        (data.ArrayDataset(torch.arange(8)).shard(data.SHARD_HINT, data.SHARD_HINT).batch(2), True),
        (data.ArrayDataset(torch.arange(8)).batch(2), False),
        (DataLoader(Shards(EIGHT), batch_size=4), True),
        (DataLoader(Shards(EIGHT), batch_size=4, shuffle=True), True),
        (DataLoader(ShardsOfBatches(EIGHT), batch_size=None), True),
        (DataLoader(ShardsOfBatches(EIGHT), batch_size=None, shuffle=True), True),
        (ShardedStream(8), True),
    ],
)
def test_who_takes_a_hint_reads_its_share_and_who_does_not_everything(dataset: Any, shares: bool) -> None:
    results, _ = read(dataset, 2, auto_shard_policy="HINT")
    assert [sorted(rows) for rows in by_rank(results)] == ([EIGHT[::2], EIGHT[1::2]] if shares else [EIGHT] * 2)


# -- what fails on one rank, or on all --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda rank: DataLoader(Numbers(10 + rank), 5), "[10, 11] items on ranks 0 to 1"),
        (lambda rank: list(torch.arange(4 + 2 * rank).split(2)), "[2, 3] batches on ranks 0 to 1"),
        (lambda rank: DataLoader(Stream(6, 100 * rank), 4), "rank(s) [1] read another first batch than rank 0"),
        (lambda rank: DataLoader(Stream(6 - 6 * rank), 4), "auto_shard_policy=AutoShardPolicy.OFF"),
    ],
)
def test_what_differs_is_refused_on_every_rank(dataset: Any, message: str) -> None:
    for found in read(dataset, 2)[0]:
        assert isinstance(found, InvalidArgumentError)
        assert message in str(found)


@pytest.mark.parametrize(
    "order",
    [
        {"sampler": Backwards(), "batch_size": 2},
        {"sampler": RandomSampler(EIGHT, replacement=True), "batch_size": 2},
        {"batch_sampler": [[0, 1], [6, 7]]},
    ],
)
def test_a_sampler_of_the_whole_does_not_go_with_a_hint(order: dict[str, Any]) -> None:
    for found in read(DataLoader(Shards(EIGHT), **order), 2, auto_shard_policy="HINT")[0]:
        assert isinstance(found, UnsupportedError)
        assert "indices of the whole" in str(found)


def broken() -> Iterator[torch.Tensor]:
    yield torch.zeros(2)
    raise KeyError("broken")


def test_what_fails_on_one_rank_is_named_on_the_others() -> None:
    sampler, told = read(DataLoader(Numbers(10), batch_size=3, sampler=_Failing()), 2)[0]
    assert isinstance(sampler, KeyError)
    assert isinstance(told, CommunicationError)
    assert "the sampler of rank 0, which draws for all ranks, raised KeyError" in str(told)
    told, pipeline = read_of_function(lambda rank: broken() if rank else [torch.zeros(2)] * 3, 2)
    assert isinstance(told, CommunicationError)
    assert "rank 1 could not read its next batch: KeyError" in str(told)
    assert isinstance(pipeline, KeyError)


def test_an_error_that_only_this_rank_sees_is_reported_to_the_others() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5:
                raise ValueError("item 5")
            return super().__getitem__(index)

    _, group = on_ranks(2, lambda layout: steps_of(distribute(DataLoader(Broken(10), batch_size=4), layout)))
    assert group.failures == ["its input failed in next(distributed_iterator): ValueError: item 5"]
