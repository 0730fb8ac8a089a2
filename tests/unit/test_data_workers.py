"""Several processes' input, with a thread and an in-memory communicator for each rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, default_collate

from tests.unit.data_ranks import joined, on_ranks, plain
from torchstrat import data
from torchstrat.data import InputLayout, InputOptions
from torchstrat.data.autoshard import _warn_of_whole_batches
from torchstrat.errors import CommunicationError, InvalidArgumentError, UnsupportedError

Steps = list[tuple[list[Any], tuple[int, ...]]]


def steps_of(dataset: Any) -> Steps:
    return [([plain(part) for part in batch.values], batch.batch_info.rows) for batch in dataset]


def read(dataset: Any, workers: int, local: int = 1, **options: Any) -> tuple[list[Any], list[list[str]]]:
    """Each rank's steps (or its exception), and what it asked of the others. ``dataset``: or a function of the rank."""

    def work(layout: InputLayout) -> Steps:
        made = dataset(layout.worker_index) if callable(dataset) else dataset
        return steps_of(data.distribute_dataset(None, layout, made, InputOptions(**options)))  # type: ignore[arg-type]

    results, group = on_ranks(workers, work, local)
    return results, group.calls


def components(results: list[Steps], step: int) -> list[Any]:
    return [part for steps in results for part in steps[step][0]]


class Fetches(Dataset[Any]):
    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return torch.tensor(index)


def _doubled(samples: list[Any]) -> Any:
    return 2 * default_collate(samples)


@pytest.mark.parametrize("collate", ["batch", "rows"])
def test_reading_whole_batches_is_said_once(collate: str, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_whole_batches.cache_clear()
    loader = DataLoader(Fetches(), batch_size=4, collate_fn=_doubled)
    with caplog.at_level(logging.WARNING, "torchstrat.data"):
        for _ in range(2):
            results, _ = read(loader, 2, collate=collate)
    assert [joined(components(results, step)) for step in range(3)] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert len(caplog.records) == (collate == "batch")
    assert all("the collate function _doubled may look at the whole batch" in one.message for one in caplog.records)


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9, -1, -1))


@pytest.mark.parametrize(("workers", "local"), [(2, 1), (3, 1), (2, 2)])
def test_ranks_share_a_loader_by_index(workers: int, local: int) -> None:
    datasets = [Fetches() for _ in range(workers)]
    results, calls = read(lambda rank: DataLoader(datasets[rank], batch_size=4), workers, local)
    assert [joined(components(results, step)) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len({tuple(rows for _, rows in steps) for steps in results}) == 1
    for steps, dataset in zip(results, datasets, strict=True):
        own = [row for parts, _ in steps for part in parts for row in part]
        assert set(own) <= set(dataset.fetched)
        assert len(dataset.fetched) <= len(own) + len(steps)  # one more where a rank has no rows, for its shape
    assert all(call == ["the length of a dataset"] for call in calls)


def test_rows_of_torchs_samplers_are_known_without_talking_in_every_step() -> None:
    results, calls = read(DataLoader(Fetches(60), batch_size=2, shuffle=True), 2)
    assert len(results[0]) == 30
    assert calls[0] == ["the length of a dataset", "the state of the sampler's random stream"]


def test_indices_of_a_foreign_sampler_come_from_rank_zero_many_at_a_time() -> None:
    def loader(rank: int) -> DataLoader[Any]:
        sampler = Backwards() if rank == 0 else _Forbidden()
        return DataLoader(Fetches(), batch_size=3, sampler=sampler)

    results, calls = read(loader, 2)
    assert [joined(components(results, step)) for step in range(4)] == [[9, 8, 7], [6, 5, 4], [3, 2, 1], [0]]
    assert calls[1] == ["the length of a dataset", "the indices of the next batches"]


class _Forbidden(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("only rank 0's sampler may be drawn from")


class _Failing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise KeyError("sampler")


def test_a_sampler_that_fails_on_rank_zero_fails_everywhere() -> None:
    results, _ = read(lambda rank: DataLoader(Fetches(), batch_size=3, sampler=_Failing()), 2)
    assert isinstance(results[0], KeyError)
    assert isinstance(results[1], CommunicationError)
    assert "the sampler of rank 0, which draws for all ranks, raised KeyError" in str(results[1])


def test_an_endless_sampler() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from range(10)

    def work(layout: InputLayout) -> Steps:
        loader = DataLoader(Fetches(), batch_size=4, sampler=Endless())
        dataset = data.distribute_dataset(None, layout, loader, None)  # type: ignore[arg-type]
        return steps_of(batch for batch, _ in zip(dataset, range(50), strict=False))

    results, _ = on_ranks(2, work)
    assert joined(components(results, 49)) == [6, 7, 8, 9]


def test_samplers_of_different_settings_are_not_replayed() -> None:
    def loader(rank: int) -> DataLoader[Any]:
        dataset = Fetches()
        return DataLoader(dataset, batch_size=5, sampler=RandomSampler(dataset, num_samples=5 * (rank + 1)))

    results, calls = read(loader, 2)
    assert calls[0] == ["the length of a dataset", "the indices of the next batches"]
    assert len(results[0]) == len(results[1]) == 1


def test_datasets_of_different_lengths_are_refused() -> None:
    results, _ = read(lambda rank: DataLoader(Fetches(10 + rank), batch_size=5), 2)
    for error in results:
        assert isinstance(error, InvalidArgumentError)
        assert "[10, 11] items on ranks 0 to 1" in str(error)


class Stream(IterableDataset[Any]):
    def __init__(self, first: int = 0, rows: int = 6) -> None:
        self.first, self.rows = first, rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.first, self.first + self.rows))


@pytest.mark.parametrize("as_batches", [False, True])
def test_iterables_are_read_in_full_and_compared_once(as_batches: bool, caplog: pytest.LogCaptureFixture) -> None:
    dataset: Any = list(torch.arange(6).split(4)) if as_batches else DataLoader(Stream(), batch_size=4)
    with caplog.at_level(logging.WARNING, "torchstrat.data"):
        results, calls = read(dataset, 3)
    assert [components(results, step) for step in range(2)] == [[[0, 1], [2, 3], []], [[4], [5], []]]
    assert calls[0] == ["the checksum of the first batch"]
    assert len(caplog.records) == (0 if as_batches else 1)


def test_iterables_of_different_lengths_are_refused_on_every_rank() -> None:
    results, _ = read(lambda rank: list(torch.arange(4 + 2 * rank).split(2)), 2)
    for error in results:
        assert isinstance(error, InvalidArgumentError)
        assert "[2, 3] batches on ranks 0 to 1" in str(error)


@pytest.mark.parametrize("rows", [0, 6])
def test_iterables_that_differ_are_refused_on_every_rank(rows: int) -> None:
    results, _ = read(lambda rank: DataLoader(Stream(100 * rank, rows if rank else 6), batch_size=4), 2)
    for error in results:
        assert isinstance(error, InvalidArgumentError)
        assert "rank(s) [1] read another first batch" in str(error)


def test_off_gives_every_rank_everything_in_rotated_sizes() -> None:
    results, _ = read([torch.arange(4), torch.arange(4, 8)], 3, auto_shard_policy="OFF")
    assert [parts for parts, _ in results[0]] == [[[0, 1]], [[2]], [[3]], [[4, 5]], [[6]], [[7]]]
    assert [parts for parts, _ in results[1]] == [[[0]], [[1]], [[2, 3]], [[4]], [[5]], [[6, 7]]]
    assert [parts for parts, _ in results[2]] == [[[0]], [[1, 2]], [[3]], [[4]], [[5, 6]], [[7]]]
    assert [rows for _, rows in results[1]] == [(2, 1, 1), (1, 1, 2), (1, 2, 1)] * 2


def test_data_that_ends_earlier_on_some_ranks() -> None:
    def dataset(rank: int) -> list[torch.Tensor]:
        return [torch.full((2,), 10 * rank + step) for step in range([1, 3, 0][rank])]

    def work(layout: InputLayout) -> Steps:
        made = data.distribute_datasets_from_function(
            None,  # type: ignore[arg-type]
            layout,
            lambda context: dataset(context.input_pipeline_id),
            None,
        )
        return steps_of(made)

    results, _ = on_ranks(3, work)
    assert results[0] == [([[0, 0]], (2, 2, 0)), ([[]], (0, 2, 0)), ([[]], (0, 2, 0))]
    assert results[2] == [([[]], (2, 2, 0)), ([[]], (0, 2, 0)), ([[]], (0, 2, 0))]


def test_a_pipeline_that_fails_on_one_rank_is_named_on_the_others() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        raise KeyError("broken")

    def work(layout: InputLayout) -> Steps:
        made = data.distribute_datasets_from_function(
            None,  # type: ignore[arg-type]
            layout,
            lambda context: broken() if context.input_pipeline_id else [torch.zeros(2)] * 3,
            None,
        )
        return steps_of(made)

    results, _ = on_ranks(2, work)
    assert isinstance(results[0], CommunicationError)
    assert "rank 1 could not read its next batch: KeyError" in str(results[0])
    assert isinstance(results[1], KeyError)


def test_an_error_that_only_this_rank_sees_is_reported_to_the_others() -> None:
    class Broken(Fetches):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5:
                raise ValueError("item 5")
            return super().__getitem__(index)

    def work(layout: InputLayout) -> Steps:
        dataset = data.distribute_dataset(None, layout, DataLoader(Broken(), batch_size=4), None)  # type: ignore[arg-type]
        return steps_of(dataset)

    _, group = on_ranks(2, work)
    assert group.failures == ["its input failed in next(distributed_iterator): ValueError: item 5"]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{index}.txt" for index in range(4)]
    for index, path in enumerate(paths):
        path.write_text("".join(f"f{index}-{line}\n" for line in range(3)), encoding="utf-8")
    return paths


@pytest.mark.parametrize("as_loader", [False, True])
def test_files_are_shared_and_cut_to_rotated_sizes(files: list[Path], as_loader: bool) -> None:
    lines = data.TextLineDataset(files)
    results, _ = read(DataLoader(lines, batch_size=2) if as_loader else lines.batch(2), 3)
    found = [[parts[0] for parts, _ in steps] for steps in results]
    assert found[0] == [["f0-0"], ["f0-1"], [], ["f0-2"], ["f3-0"], [], ["f3-1"], ["f3-2"], []]
    assert found[1] == [["f1-0"], [], ["f1-1"], ["f1-2"], [], [], [], [], []]
    assert found[2] == [[], ["f2-0"], ["f2-1"], [], ["f2-2"], [], [], [], []]


def test_fewer_files_than_processes_is_an_error_on_every_rank(files: list[Path]) -> None:
    results, _ = read(data.TextLineDataset(files[:1]).batch(2), 2)
    assert all(isinstance(error, InvalidArgumentError) for error in results)
    assert "1 file(s) cannot be shared by 2 processes" in str(results[0])


def test_the_file_policy_needs_files() -> None:
    results, _ = read([torch.arange(4)], 2, auto_shard_policy="FILE")
    assert all(
        isinstance(error, InvalidArgumentError) and "needs a dataset that reads files" in str(error)
        for error in results
    )


def test_hints() -> None:
    hint = data.SHARD_HINT
    hinted = data.ArrayDataset(torch.arange(6)).shard(hint, hint).batch(2)
    results, _ = read(hinted, 2, auto_shard_policy="HINT")
    assert [joined((parts[0] for parts, _ in steps)) for steps in results] == [[0, 2, 4], [1, 3, 5]]
    results, _ = read(data.ArrayDataset(torch.arange(6)).batch(2), 2, auto_shard_policy="HINT")
    assert [joined((parts[0] for parts, _ in steps)) for steps in results] == [list(range(6))] * 2


class Shards(Fetches):
    def __init__(self, rows: list[int]) -> None:
        super().__init__(len(rows))
        self.rows = rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(self.rows[index])

    def shard(self, shards: int, index: int) -> Shards:
        return Shards(self.rows[index::shards])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch", [4, None])
def test_a_map_style_dataset_in_a_loader_takes_the_hint(shuffle: bool, batch: int | None) -> None:
    class Batches(Shards):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index).reshape(1)

        def shard(self, shards: int, index: int) -> Shards:
            return Batches(self.rows[index::shards])

    rows = list(range(8))
    dataset = Shards(rows) if batch else Batches(rows)
    results, _ = read(DataLoader(dataset, batch_size=batch, shuffle=shuffle), 2, auto_shard_policy="HINT")
    found = [joined((parts[0] for parts, _ in steps)) for steps in results]
    assert [sorted(part) for part in found] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    "order",
    [
        {"sampler": Backwards(), "batch_size": 2},
        {"sampler": RandomSampler(range(8), replacement=True), "batch_size": 2},
        {"batch_sampler": [[0, 1], [6, 7]]},
    ],
)
def test_a_sampler_of_the_whole_does_not_go_with_a_hint(order: dict[str, Any]) -> None:
    results, _ = read(DataLoader(Shards(list(range(8))), **order), 2, auto_shard_policy="HINT")
    assert all(isinstance(error, UnsupportedError) and "indices of the whole" in str(error) for error in results)


def test_a_dataset_with_a_shard_method_takes_the_hint() -> None:
    class Sharded(Stream):
        def shard(self, shards: int, index: int) -> list[torch.Tensor]:
            return [torch.arange(4)[index::shards]]

    results, _ = read(Sharded(), 2, auto_shard_policy="HINT")
    assert [joined((parts[0] for parts, _ in steps)) for steps in results] == [[0, 2], [1, 3]]
