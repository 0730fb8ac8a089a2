"""`Pipeline.shuffle` and `Pipeline.prefetch`: orders that every process shares, and reading ahead that ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.input_ranks import distribute, joined, layout_in_process, on_ranks
from torchstrat import data
from torchstrat.data import ArrayDataset, InputLayout, Pipeline
from torchstrat.errors import InvalidArgumentError

ROWS = 24
ALL = list(range(ROWS))


def numbers() -> Pipeline:
    return ArrayDataset(torch.arange(ROWS))


def orders(dataset: Any, passes: int = 2) -> list[list[int]]:
    return [[int(row) for row in dataset] for _ in range(passes)]


def distributed_rows(dataset: Pipeline, layout: InputLayout, policy: str = "DATA", passes: int = 1) -> list[list[int]]:
    found = distribute(dataset, layout, auto_shard_policy=policy)
    return [joined(part.tolist() for batch in found for part in batch.values) for _ in range(passes)]


@pytest.mark.parametrize("seed", [None, 3])
def test_every_pass_is_another_order_of_the_same_rows(seed: int | None) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = orders(numbers().shuffle(ROWS, seed=seed))
    assert torch.get_rng_state().equal(before) == (seed is not None)
    assert sorted(first) == sorted(second) == ALL
    assert len({tuple(ALL), tuple(first), tuple(second)}) == 3
    torch.manual_seed(0)
    assert orders(numbers().shuffle(ROWS, seed=seed)) == [first, second]
    assert orders(numbers().shuffle(ROWS, seed=4)) != [first, second]


def test_repetitions_are_shuffled_anew() -> None:
    [order] = orders(numbers().shuffle(ROWS, seed=3).repeat(3), passes=1)
    rounds = [order[start : start + ROWS] for start in range(0, 3 * ROWS, ROWS)]
    assert all(sorted(one) == ALL for one in rounds)
    assert len({tuple(one) for one in rounds}) == 3


def test_rows_come_from_the_next_of_the_buffer() -> None:
    [order] = orders(numbers().shuffle(4), passes=1)
    assert sorted(order) == ALL
    assert all(row < position + 4 for position, row in enumerate(order))


def test_what_does_not_shuffle_draws_nothing() -> None:
    before = torch.get_rng_state()
    orders(numbers().batch(2).unbatch())
    distributed_rows(numbers().batch(4), layout_in_process(2))
    assert torch.get_rng_state().equal(before)


def test_shuffled_rows_over_the_workers_of_a_loader() -> None:
    first, second = orders(DataLoader(numbers().shuffle(ROWS), batch_size=None, num_workers=2))
    assert sorted(first) == sorted(second) == ALL
    assert first != second


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    ("policy", "prepare"),
    [
        ("DATA", lambda dataset: dataset.batch(4)),
        ("HINT", lambda dataset: dataset.shard(data.SHARD_HINT, data.SHARD_HINT).batch(4)),
    ],
)
def test_all_processes_shuffle_as_rank_zero(policy: str, prepare: Callable[[Pipeline], Pipeline], seed: Any) -> None:
    # The ranks are threads, which draw different numbers from one generator.
    results, _ = on_ranks(
        2, lambda layout: distributed_rows(prepare(numbers().shuffle(ROWS, seed)), layout, policy, passes=2)
    )
    epochs = [[passes[epoch] for passes in results] for epoch in range(2)]
    for shares in epochs:
        assert sorted(joined(shares)) == ALL
        assert [len(share) for share in shares] == [ROWS // 2] * 2
        assert joined(shares) != ALL
    assert epochs[0] != epochs[1]


# -- prefetch ---------------------------------------------------------------------------------------------------------


def test_prefetch_changes_nothing_but_the_time_of_reading() -> None:
    plain, ahead = numbers().batch(4), numbers().batch(4).prefetch(3)
    assert [batch.tolist() for batch in ahead] == [batch.tolist() for batch in plain]
    assert (ahead.cardinality, ahead.batch_size, ahead.element_spec) == (6, 4, plain.element_spec)
    assert distributed_rows(ahead, layout_in_process(2)) == [ALL]


def test_prefetch_reads_in_another_thread_and_that_many_ahead() -> None:
    threads: list[threading.Thread] = []
    third_read = threading.Event()

    def note(row: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread())
        if len(threads) == 3:
            third_read.set()
        return row

    iterator = iter(numbers().map(note).prefetch(data.AUTOTUNE))
    assert int(next(iterator)) == 0
    assert third_read.wait(30)
    assert threading.current_thread() not in threads
    del iterator
    threads[0].join(30)
    assert not threads[0].is_alive()
    assert len(threads) == 3


def test_prefetch_hands_on_what_reading_raised() -> None:
    iterator = iter(numbers().map(lambda row: row // (1 - row)).prefetch(2))
    assert int(next(iterator)) == 0
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        next(iterator)


@pytest.mark.parametrize("size", [0, -2, 1.5, True])
def test_sizes(size: Any) -> None:
    for method in (numbers().shuffle, numbers().prefetch):
        with pytest.raises(InvalidArgumentError, match="buffer_size"):
            method(size)
