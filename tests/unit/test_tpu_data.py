"""Datasets of a TPU strategy: batches that are on their way to the devices, and those that do not divide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrat as ts
from tests.unit.tpu_beside_mirrored import fake_tpu, mirrored
from torchstrat.errors import OutOfRangeError
from torchstrat.testing.fake_spmd import FakeSpmdRuntime
from torchstrat.tpu.lane_values import LaneValues


@pytest.fixture
def strategy() -> Iterator[ts.TPUStrategy]:
    with fake_tpu(2) as made:
        yield made


def loader(rows: int = 10, batch: int = 4) -> DataLoader[Any]:
    x = torch.arange(rows * 2.0).reshape(rows, 2)
    return DataLoader(TensorDataset(x, torch.arange(rows)), batch_size=batch)


def seen(strategy: ts.Strategy, dataset: Any) -> list[Any]:
    """Of each batch, what each replica that had rows saw."""
    found: list[Any] = []
    for batch in dataset:
        result = strategy.run(lambda batch: (batch[0] * 1, batch[1] * 1), args=(batch,))
        columns = [[one.tolist() for one in strategy.local_results(leaf)] for leaf in result]
        found.append(list(zip(*columns, strict=True)))
    return found


@pytest.mark.parametrize(("rows", "batch"), [(8, 4), (10, 4), (9, 3), (5, 4)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_see_what_they_see_on_other_strategies(rows: int, batch: int, replicas: int) -> None:
    with mirrored(replicas) as other:
        expected = seen(other, other.distribute_dataset(loader(rows, batch)))
    with fake_tpu(replicas) as strategy:
        assert seen(strategy, strategy.distribute_dataset(loader(rows, batch))) == expected


def test_even_batches_are_placed_once_and_uneven_ones_are_not(strategy: ts.TPUStrategy) -> None:
    runtime = strategy._system.runtime
    assert isinstance(runtime, FakeSpmdRuntime)
    batches = list(strategy.distribute_dataset(loader(11, 4)))  # 4, 4 and 3 rows
    assert [type(batch[0]) for batch in batches] == [LaneValues, LaneValues, ts.PerReplica]
    assert runtime.placed == 4  # two leaves of two batches
    assert [batch[0].batch_info.rows for batch in batches] == [(2, 2), (2, 2), (2, 1)]
    strategy.run(lambda batch: batch[0].sum(), args=(batches[0],))
    assert [one.tolist() for one in batches[1][1].values] == [[4, 5], [6, 7]]


def test_one_replica_gets_bare_tensors() -> None:
    with fake_tpu(1) as strategy:
        batches = list(strategy.distribute_dataset(loader(4, 2)))
        assert all(isinstance(leaf, torch.Tensor) for batch in batches for leaf in batch)


def test_a_mean_over_uneven_batches_counts_rows(strategy: ts.TPUStrategy) -> None:
    with strategy.scope():
        weight = torch.nn.Linear(2, 1, bias=False)
    for batch in strategy.distribute_dataset(loader(11, 4)):
        weight.zero_grad()
        strategy.run(lambda batch: weight(batch[0]).mean().backward(), args=(batch,))
    last = torch.arange(22.0).reshape(11, 2)[8:]
    torch.testing.assert_close(weight.weight.grad, last.mean(dim=0, keepdim=True))


def test_one_after_the_other(strategy: ts.TPUStrategy) -> None:
    iterator = iter(strategy.distribute_dataset(loader(8, 4)))
    assert len(strategy.local_results(iterator.get_next())) == 2
    assert iterator.get_next_as_optional().has_value()
    with pytest.raises(OutOfRangeError):
        iterator.get_next()


def test_specs(strategy: ts.TPUStrategy) -> None:
    with mirrored() as other:
        expected = other.distribute_dataset(loader()).element_spec
    spec = strategy.distribute_dataset(loader()).element_spec
    assert repr(spec) == repr(expected)


def test_datasets_from_a_function(strategy: ts.TPUStrategy) -> None:
    contexts: list[Any] = []

    def make(context: Any) -> Any:
        contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return loader(8, context.get_per_replica_batch_size(4))

    found = seen(strategy, strategy.distribute_datasets_from_function(make))
    assert contexts == [(1, 0, 2)]
    assert [[y for _, y in batch] for batch in found] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_values_from_a_function(strategy: ts.TPUStrategy) -> None:
    values = strategy.distribute_values_from_function(lambda context: torch.tensor(context.replica_id_in_sync_group))
    result = strategy.run(lambda x: x + 1, args=(values,))
    assert [int(one) for one in result.values] == [1, 2]


def test_dicts_texts_and_arrays(strategy: ts.TPUStrategy) -> None:
    batches = [{"x": torch.arange(4.0), "n": torch.arange(4).numpy()}]
    (batch,) = strategy.distribute_dataset(batches)
    result = strategy.run(lambda batch: batch["x"] + batch["n"], args=(batch,))
    assert [one.tolist() for one in result.values] == [[0, 2], [4, 6]]
