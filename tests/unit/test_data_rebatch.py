"""How rows are divided over replicas: the two rules, and cutting a stream of batches."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchstrat.data import batch_sizes_for_worker
from torchstrat.data.rebatch import equal_chunks, fixed_sizes
from torchstrat.data.streams import cut_stream
from torchstrat.errors import InvalidArgumentError, WrongTypeError

ROWS_AND_REPLICAS = list(itertools.product(range(18), range(1, 7)))


@pytest.mark.parametrize(
    ("rows", "replicas", "expected"),
    [(5, 4, (2, 2, 1, 0)), (4, 3, (2, 2, 0)), (8, 3, (3, 3, 2)), (1, 2, (1, 0)), (0, 2, (0, 0))],
)
def test_equal_chunks(rows: int, replicas: int, expected: tuple[int, ...]) -> None:
    assert equal_chunks(rows, replicas) == expected


@pytest.mark.parametrize(("rows", "replicas", "expected"), [(5, 4, (2, 1, 1, 1)), (8, 3, (3, 3, 2)), (1, 3, (1, 0, 0))])
def test_fixed_sizes(rows: int, replicas: int, expected: tuple[int, ...]) -> None:
    assert fixed_sizes(rows, replicas) == expected


@pytest.mark.parametrize(("rows", "replicas"), ROWS_AND_REPLICAS)
def test_neither_rule_loses_a_row(rows: int, replicas: int) -> None:
    assert sum(equal_chunks(rows, replicas)) == sum(fixed_sizes(rows, replicas)) == rows
    assert max(fixed_sizes(rows, replicas)) - min(fixed_sizes(rows, replicas)) <= 1


@pytest.mark.parametrize(("batch", "workers", "local"), list(itertools.product(range(12), (1, 2, 3), (1, 2))))
def test_workers_sizes_add_up_to_the_global_batch_in_every_step(batch: int, workers: int, local: int) -> None:
    cycles = [batch_sizes_for_worker(batch, workers, local, worker) for worker in range(workers)]
    for step in range(workers):
        in_step = [cycle[step * local : (step + 1) * local] for cycle in cycles]
        assert sum(map(sum, in_step)) == batch


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((-1, 1, 1, 0), "global_batch=-1"), ((4, 0, 1, 0), "num_workers=0"), ((4, 2, 1, 2), "worker_index=2")],
)
def test_impossible_workers_are_refused(arguments: tuple[int, int, int, int], error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        batch_sizes_for_worker(*arguments)


def test_sizes_must_be_whole_numbers() -> None:
    with pytest.raises(WrongTypeError, match=r"global_batch must be an int; got 4\.0"):
        batch_sizes_for_worker(4.0, 1, 1, 0)  # type: ignore[arg-type]


def cut(rows: int, batch: int, sizes: list[int], drop: bool = False) -> list[list[int]]:
    batches = iter(torch.arange(rows).split(batch)) if rows else iter(())
    return [part.tolist() for part in cut_stream(batches, sizes, drop)]


def test_rows_are_cut_across_the_borders_of_batches() -> None:
    assert cut(8, 3, [2, 2]) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_short_end_is_kept_or_dropped() -> None:
    assert cut(5, 5, [3, 3]) == [[0, 1, 2], [3, 4]]
    assert cut(5, 5, [3, 3], drop=True) == [[0, 1, 2]]


def test_sizes_of_zero_are_empty_batches_up_to_the_next_size_that_needs_rows() -> None:
    assert cut(2, 1, [0, 1, 0]) == [[], [0], [], [], [1], [], []]


def test_cutting_nothing_is_nothing() -> None:
    assert cut(0, 1, [0, 1]) == []


def test_sizes_without_rows_would_never_end() -> None:
    with pytest.raises(InvalidArgumentError, match=r"sizes=\[0, 0\]"):
        cut(4, 2, [0, 0])


@pytest.mark.parametrize(("rows", "batch"), list(itertools.product((1, 5, 9, 16), (1, 3, 4, 7))))
def test_cutting_keeps_every_row_in_order(rows: int, batch: int) -> None:
    parts = cut(rows, batch, [2, 0, 1])
    assert list(itertools.chain(*parts)) == list(range(rows))


def test_leaves_of_different_lengths_cannot_be_cut_together() -> None:
    batches = iter([(torch.zeros(4), torch.zeros(2))])
    with pytest.raises(InvalidArgumentError, match=r"batch\[0\] has 4, batch\[1\] has 2"):
        list(cut_stream(batches, [2, 2]))
