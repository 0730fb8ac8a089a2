"""The programs of TensorFlow's documents on CentralStorageStrategy (2.3 and v1) and on what all strategies share.

Each is one example, translated, with what the document prints; where torchstrat promises something else, that. A
``GPU:0`` is a virtual replica ``cpu:0``, and ``tf.function`` nothing: steps run as written. Most examples are not here:
tests/conformance has recorded them, and more like them, from TensorFlow itself. `test_compat` runs the v1 document's
programs on every strategy; the documents of parameter servers and of TPUs have files of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchstrat as ts
from torchstrat.data import distribute_dataset

ONE, TWO = ("cpu:0",), ("cpu:0", "cpu:1")


def central() -> ts.Strategy:
    return ts.CentralStorageStrategy([*TWO])


def mirrored(devices: tuple[str, ...] = TWO) -> ts.Strategy:
    return ts.MirroredStrategy([*devices])


def dataset_range(count: int) -> ts.data.ArrayDataset:
    """``tf.data.Dataset.range``."""
    return ts.data.ArrayDataset(torch.arange(count))


def shown(strategy: ts.Strategy, value: Any) -> list[Any]:
    """The components of a value as plain Python."""
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in strategy.local_results(value)]


def test_reduce() -> None:
    strategy = central()
    (x,) = strategy.experimental_distribute_dataset(dataset_range(8).batch(8))  # with the batch that is meant
    per_replica = strategy.run(lambda val: val, args=(x,))
    result = strategy.reduce(ts.ReduceOp.SUM, per_replica, axis=None).numpy()
    assert result.tolist() == [4, 6, 8, 10]
    assert strategy.reduce(ts.ReduceOp.SUM, per_replica, axis=0).numpy() == 28
    # The document reduces the first result once more. That is one array and not a value per replica: each of the two
    # replicas contributes all of it.
    assert strategy.reduce(ts.ReduceOp.SUM, result, axis=0) == 2 * 28
    strategy.close()


def test_distribute_dataset_prints_per_replica_values() -> None:
    strategy = mirrored()
    dataset = strategy.experimental_distribute_dataset(dataset_range(4).batch(2))
    result = [strategy.run(lambda value: value * 2, args=(x,)) for x in dataset]
    assert str(result) == (
        "[PerReplica:{\n  0: tensor([0]),\n  1: tensor([2])\n}, PerReplica:{\n  0: tensor([4]),\n  1: tensor([6])\n}]"
    )
    assert all(isinstance(one, ts.DistributedValues) for one in result)
    assert isinstance(dataset, ts.DistributedDataset)
    assert not [name for name in ("map", "batch", "shuffle", "repeat") if hasattr(dataset, name)]
    strategy.close()


@pytest.mark.parametrize("kind", ["worker", "ps"])
def test_cluster_resolver_tells_the_task_type(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The document's cluster has two workers; one is enough to ask who this is, and waits for nobody.
    cluster = {"worker": ["localhost:12345"], "ps": ["localhost:34567"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}}))
    if kind == "worker":
        strategy = ts.experimental.MultiWorkerMirroredStrategy()
        resolver = strategy.cluster_resolver
        strategy.close()
    else:  # a server takes no part in the workers' collectives, so it has no such strategy
        resolver = ts.cluster_resolver.TFConfigClusterResolver()
    assert resolver.task_type == kind
    assert resolver.cluster_spec().as_dict()["ps"] == ["localhost:34567"]


def test_a_buffer_of_as_many_batches_as_there_are_replicas() -> None:
    # Where batches are copied, the next global batch (one part for each replica) is on its way while this one is used.
    reads: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(10):
            reads.append(number)
            yield torch.full((4,), number)

    elsewhere = ts.data.InputLayout(2, (0, 1), (torch.device("meta"),) * 2, 1, 0, False, None)
    iterator = iter(distribute_dataset(mirrored, elsewhere, batches(), None))
    for step in range(3):
        next(iterator)
        assert reads[-1] == step + 1
    iterator.close()


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_scope(devices: tuple[str, ...]) -> None:
    strategy = mirrored(devices)
    with strategy.scope() as current:
        assert current is strategy is ts.get_strategy()
        assert ts.in_cross_replica_context()
        mirrored_variable = ts.Variable(1.0)
    assert shown(strategy, mirrored_variable) == [1.0] * len(devices)
    regular_variable = ts.Variable(1.0)
    assert repr(regular_variable) == (
        "<Variable 'Variable' shape=(), dtype=torch.float32, aggregation=NONE on cpu:0: tensor(1.)>"
    )
    created = strategy.extended.variable_created_in_scope
    assert (created(mirrored_variable), created(regular_variable)) == (True, False)
    # A variable captures its strategy, and is read and written outside of the scope.
    assert not ts.has_strategy()
    mirrored_variable.assign_add(2.0)
    assert shown(strategy, mirrored_variable) == [3.0] * len(devices)
    strategy.close()


def test_saving_may_stand_in_or_out_of_the_scope(tmp_path: Path) -> None:
    strategy = central()
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        ts.Checkpoint(model=model).save(tmp_path / "inside")
    before = model.weight.detach().clone()
    ts.Checkpoint(model=model).save(tmp_path / "outside")
    for path in ("inside", "outside"):
        torch.nn.init.zeros_(model.weight)
        ts.Checkpoint(model=model).restore(tmp_path / path)
        assert torch.equal(model.weight, before)
    strategy.close()
