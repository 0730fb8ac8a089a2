"""The example programs of TensorFlow 2.2's document on TPUStrategy, on the fake of a TPU.

Each test is one example, translated line by line; `tpu_system` stands for the two calls that start a TPU. What a real
compiler makes of annotations is shown by the tests that need torch_xla.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from tests.support.tpu import fake_tpu, seen
from torchstrat.errors import InvalidArgumentError
from torchstrat.testing.fake_tpu import FakeSpmdRuntime

MESH = [2, 2, 1, 2]
"""Four chips of two cores."""

Make = Callable[..., ts.TPUStrategy]


@pytest.fixture
def tpu_system() -> Iterator[Make]:
    """``TPUStrategy`` on a TPU of that mesh, of replicas of ``computation_shape``."""
    made: list[ts.TPUStrategy] = []

    def make(
        computation_shape: list[int], num_replicas: int, *args: Any, keyword: str = "device_assignment"
    ) -> ts.TPUStrategy:
        assignment = ts.tpu.experimental.DeviceAssignment.build(
            ts.tpu.Topology.virtual(MESH), computation_shape=computation_shape, num_replicas=num_replicas
        )
        runtime = FakeSpmdRuntime(math.prod(MESH), MESH)
        made.append(ts.experimental.TPUStrategy(*args, _runtime=runtime, **{keyword: assignment}))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


@pytest.fixture
def strategy() -> Iterator[ts.TPUStrategy]:
    with fake_tpu(2) as made:
        yield made


def images_and_labels(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One global batch: images ``(rows, 4, 8, 3)``, labels ``(rows, 5)``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, 8, 3, generator=generator), torch.randn(rows, 5, generator=generator)


# -- logical devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("computation_shape", [[1, 1, 2], [1, 1, 1, 2]])
@pytest.mark.parametrize("keyword", ["device_assignment", "experimental_device_assignment"])
def test_assign_to_logical_device(computation_shape: list[int], keyword: str, tpu_system: Make) -> None:
    # Initializing TPU system with 2 logical devices and 4 replicas.
    resolver = ts.cluster_resolver.TPUClusterResolver(tpu="local")
    ts.tpu.experimental_connect_to_cluster(resolver)
    strategy = tpu_system(computation_shape, 4, resolver, keyword=keyword)
    assert (strategy.num_replicas_in_sync, strategy.num_logical_devices) == (4, 2)
    assert strategy.cluster_resolver is resolver
    iterator = iter(strategy.experimental_distribute_dataset([torch.arange(8.0)]))

    def step_fn(inputs: torch.Tensor) -> torch.Tensor:
        output = torch.add(inputs, inputs)
        # TensorFlow executes the addition on logical device 0; here the number is checked, and a warning says that
        # nothing is moved.
        return strategy.experimental_assign_to_logical_device(output, 0)

    with pytest.warns(UserWarning, match="cannot keep a tensor to one of them"):
        result = strategy.run(step_fn, args=(next(iterator),))
    assert strategy.gather(result, axis=0).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    for logical_device_id in (-1, 2):
        with pytest.raises(ValueError, match="a replica has 2 logical devices"):
            strategy.experimental_assign_to_logical_device(torch.zeros(1), logical_device_id)


@pytest.mark.parametrize("computation_shape", [[2, 2, 2], [2, 2, 1, 2]])
def test_split_to_logical_devices(computation_shape: list[int], tpu_system: Make) -> None:
    # Initializing TPU system with 8 logical devices and 1 replica.
    strategy = tpu_system(computation_shape, 1)
    assert (strategy.num_replicas_in_sync, strategy.num_logical_devices) == (1, 8)
    with strategy.scope():
        model = nn.Conv2d(4, 2, 1)
    images, _ = images_and_labels(2)
    iterator = iter(strategy.experimental_distribute_dataset([images]))

    def step_fn(inputs: torch.Tensor) -> torch.Tensor:
        inputs = strategy.experimental_split_to_logical_devices(inputs, [1, 2, 4, 1])
        # model() function will be executed on 8 logical devices with `inputs` split 2 * 4 ways.
        return model(inputs)

    assert torch.allclose(strategy.run(step_fn, args=(next(iterator),)), model(images))
    # 1) as many entries as dimensions, 2) whose product is the number of logical devices, 3) that divide the sizes.
    for dims, message in (
        ([2, 4], "numbers of entries and dimensions differ"),
        ([1, 2, 2, 1], "makes 4 parts, and a replica has 8 logical devices"),
        ([1, 8, 1, 1], "dimension 1 has size 4, which does not divide into 8"),
    ):
        with pytest.raises(ValueError, match=message):
            strategy.experimental_split_to_logical_devices(images, dims)


def test_replicate_to_logical_devices(tpu_system: Make) -> None:
    # The document builds 2 logical devices and cuts images into 8 parts, which cannot be; it means 8 logical devices.
    images, labels = images_and_labels(2)
    with pytest.raises(InvalidArgumentError, match="makes 8 parts, and a replica has 2 logical devices"):
        tpu_system([1, 1, 2], 4).experimental_split_to_logical_devices(images, [1, 2, 4, 1])

    strategy = tpu_system([2, 2, 2], 1)
    with strategy.scope():
        model = nn.Sequential(nn.Flatten(), nn.Linear(4 * 8 * 3, 5))
    iterator = iter(strategy.experimental_distribute_dataset([(images, labels)]))

    def step_fn(inputs: Any) -> torch.Tensor:
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 4, 1])
        output = model(images)
        # For loss calculation, all logical devices share the same logits and labels.
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return F.mse_loss(output, labels)

    loss = strategy.run(step_fn, args=(next(iterator),))
    assert torch.allclose(loss, F.mse_loss(model(images), labels))


# -- input -------------------------------------------------------------------------------------------------------------


def test_datasets_of_files(tmp_path: Path, strategy: ts.TPUStrategy) -> None:
    """TFRecord files have no reader here, lines of text have. Sharding over workers can be disabled."""
    files = [tmp_path / f"{number}.txt" for number in range(1, 5)]
    for number, path in enumerate(files):
        path.write_text("".join(f"{4 * number + line}\n" for line in range(4)))
    dataset = ts.data.TextLineDataset(files).map(lambda line: torch.tensor(float(line))).batch(4)
    for options in (None, ts.InputOptions(auto_shard_policy=ts.AutoShardPolicy.OFF)):
        dist_dataset = strategy.experimental_distribute_dataset(dataset, options)
        totals = [strategy.run(lambda batch: batch.sum(), args=(x,)) for x in dist_dataset]
        assert [float(strategy.reduce("sum", one)) for one in totals] == [6, 22, 38, 54]


def test_element_spec_of_a_distributed_dataset(strategy: ts.TPUStrategy) -> None:
    dataset = ts.data.ArrayDataset(torch.arange(16.0)).batch(4, drop_remainder=True)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    # What `tf.function(input_signature=...)` needs; here it says which shape each replica's step sees.
    assert dist_dataset.element_spec == ts.data.PerReplicaSpec((ts.data.TensorSpec((2,), torch.float32),) * 2)
    shapes = []
    for x in dist_dataset:
        strategy.run(lambda inputs: shapes.append(tuple(inputs.shape)), args=(x,))
    assert set(shapes) == {(2,)}


def test_distribute_datasets_from_function(strategy: ts.TPUStrategy) -> None:
    def dataset_fn(input_context: ts.InputContext) -> ts.data.Pipeline:
        batch_size = input_context.get_per_replica_batch_size(8)
        d = ts.data.ArrayDataset(torch.tensor([[[1.0]]])).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    iterator = iter(inputs)
    assert iterator.element_spec == inputs.element_spec
    [first, _] = iterator.element_spec.values
    assert (first.shape[1:], first.dtype) == ((1, 1), torch.float32)
    for _ in range(3):
        assert seen(strategy.run(lambda batch: batch.sum(), args=(next(iterator),))) == [4.0, 4.0]


def test_make_numpy_dataset(strategy: ts.TPUStrategy) -> None:
    dataset = strategy.experimental_make_numpy_dataset(np.ones([10], dtype=np.float32))
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(4))  # the document's scalars have no rows
    assert sum(float(strategy.reduce("sum", batch, axis=0)) for batch in dist_dataset) == 10


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value_fn", "expected"),
    [
        (lambda ctx: torch.tensor(1.0), (torch.tensor(1.0), torch.tensor(1.0))),
        (lambda ctx: np.array([3.0, 2.0, 1.0])[ctx.replica_id_in_sync_group], (3.0, 2.0)),
        (lambda ctx: ctx.num_replicas_in_sync, (2, 2)),
    ],
    ids=["constant per replica", "by replica id", "number of replicas"],
)
def test_values_from_function(value_fn: Any, expected: Any, strategy: ts.TPUStrategy) -> None:
    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    assert strategy.experimental_local_results(distributed_values) == expected


def test_values_from_function_placed_on_devices(strategy: ts.TPUStrategy) -> None:
    # No `with tf.device(worker_devices[i])`: a core is no torch.device, and `run` moves what it is given.
    assert strategy.extended.worker_devices == ("/task:0/device:TPU:0", "/task:0/device:TPU:1")
    multiple_values = [torch.tensor(1.0 + i) for i in range(strategy.num_replicas_in_sync)]
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda ctx: multiple_values[ctx.replica_id_in_sync_group]
    )
    assert seen(strategy.run(lambda value: value * 10, args=(distributed_values,))) == [10.0, 20.0]


@pytest.mark.parametrize(("axis", "expected"), [(None, [4, 6, 8, 10]), (0, 28)])
def test_reduce(axis: int | None, expected: Any, strategy: ts.TPUStrategy) -> None:
    batch = next(iter(strategy.experimental_distribute_dataset([torch.arange(8)])))
    per_replica = strategy.run(lambda x: x * 1, args=(batch,))
    assert strategy.reduce(ts.ReduceOp.SUM, per_replica, axis=axis).tolist() == expected


def test_run_and_scope(strategy: ts.TPUStrategy) -> None:
    # TensorFlow needs a tf.function here. The options are TensorFlow's.
    options = ts.RunOptions(experimental_enable_dynamic_batch_size=True, experimental_bucketizing_dynamic_shape=False)
    result = strategy.run(lambda x, y: x + y, args=(torch.tensor(1.0),), kwargs={"y": 2.0}, options=options)
    assert {float(one) for one in strategy.local_results(result)} == {3.0}
    with strategy.scope() as current:
        assert current is strategy
        assert ts.get_strategy() is strategy
        variable = ts.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(variable)
    assert float(variable) == 1.0
