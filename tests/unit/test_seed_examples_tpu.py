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
from torchstrat.errors import InvalidArgumentError
from torchstrat.testing.fake_spmd import FakeSpmdRuntime
from torchstrat.testing.fake_tpu import fake_tpu_strategy

MESH = [2, 2, 1, 2]
"""Four chips of two cores."""

MakeStrategy = Callable[..., ts.TPUStrategy]


@pytest.fixture
def tpu_system() -> Iterator[tuple[ts.tpu.Topology, MakeStrategy]]:
    """What ``ts.tpu.initialize_tpu_system(resolver)`` returns on a TPU of that mesh, and ``TPUStrategy`` on it."""
    made: list[ts.TPUStrategy] = []

    def make(*args: Any, **kwargs: Any) -> ts.TPUStrategy:
        made.append(ts.experimental.TPUStrategy(*args, _runtime=FakeSpmdRuntime(math.prod(MESH), MESH), **kwargs))
        return made[-1]

    yield ts.tpu.Topology.virtual(MESH), make
    for strategy in made:
        strategy.close()


@pytest.fixture
def strategy() -> Iterator[ts.TPUStrategy]:
    made = fake_tpu_strategy(2)
    yield made
    made.close()


def images_and_labels(rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One global batch: images ``(rows, 4, 8, 3)``, labels ``(rows, 5)``."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 4, 8, 3, generator=generator), torch.randn(rows, 5, generator=generator))]


# -- logical devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("computation_shape", [[1, 1, 2], [1, 1, 1, 2]])
@pytest.mark.parametrize("keyword", ["device_assignment", "experimental_device_assignment"])
def test_assign_to_logical_device(computation_shape: list[int], keyword: str, tpu_system: Any) -> None:
    # Initializing TPU system with 2 logical devices and 4 replicas.
    resolver = ts.cluster_resolver.TPUClusterResolver(tpu="local")
    ts.tpu.experimental_connect_to_cluster(resolver)
    topology, make = tpu_system
    device_assignment = ts.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=computation_shape, num_replicas=4
    )
    strategy = make(resolver, **{keyword: device_assignment})
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
def test_split_to_logical_devices(computation_shape: list[int], tpu_system: Any) -> None:
    # Initializing TPU system with 8 logical devices and 1 replica.
    resolver = ts.cluster_resolver.TPUClusterResolver(tpu="local")
    topology, make = tpu_system
    device_assignment = ts.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=computation_shape, num_replicas=1
    )
    strategy = make(resolver, device_assignment=device_assignment)
    assert (strategy.num_replicas_in_sync, strategy.num_logical_devices) == (1, 8)
    with strategy.scope():
        model = nn.Conv2d(4, 2, 1)
    images, _ = images_and_labels(2)[0]
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


def test_replicate_to_logical_devices(tpu_system: Any) -> None:
    # The document builds 2 logical devices and cuts images into 8 parts, which cannot be; it means 8 logical devices.
    topology, make = tpu_system
    build = ts.tpu.experimental.DeviceAssignment.build
    two = make(device_assignment=build(topology, computation_shape=[1, 1, 2], num_replicas=4))
    images, labels = images_and_labels(2)[0]
    with pytest.raises(InvalidArgumentError, match="makes 8 parts, and a replica has 2 logical devices"):
        two.experimental_split_to_logical_devices(images, [1, 2, 4, 1])

    strategy = make(device_assignment=build(topology, computation_shape=[2, 2, 2], num_replicas=1))
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


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Four files of four numbers each; TFRecord files have no reader here, lines of text have."""
    paths = [tmp_path / f"{number}.txt" for number in range(1, 5)]
    for number, path in enumerate(paths):
        path.write_text("".join(f"{4 * number + line}\n" for line in range(4)))
    return paths


def lines_as_numbers(files: list[Path]) -> ts.data.Pipeline:
    return ts.data.TextLineDataset(files).map(lambda line: torch.tensor(float(line)))


def test_distribute_dataset_of_files(files: list[Path], strategy: ts.TPUStrategy) -> None:
    # Create a dataset
    dataset = lines_as_numbers(files).batch(4)
    # Distribute that dataset
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    # Iterate over the distributed dataset
    seen = []
    for x in dist_dataset:
        # process dataset elements
        seen.append(strategy.run(lambda batch: batch.sum(), args=(x,)))
    assert [float(strategy.reduce("sum", one)) for one in seen] == [6, 22, 38, 54]


def test_sharding_over_workers_can_be_disabled(files: list[Path], strategy: ts.TPUStrategy) -> None:
    dataset = lines_as_numbers(files).batch(4)
    options = ts.InputOptions(auto_shard_policy=ts.AutoShardPolicy.OFF)
    dist_dataset = strategy.experimental_distribute_dataset(dataset, options)
    assert sum(float(strategy.reduce("sum", batch, axis=0)) for batch in dist_dataset) == sum(range(16))


def test_element_spec_of_a_distributed_dataset(strategy: ts.TPUStrategy) -> None:
    dataset = ts.data.ArrayDataset(torch.arange(16.0)).batch(4, drop_remainder=True)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    # What `tf.function(input_signature=...)` needs; here it says which shape each replica's step sees.
    assert dist_dataset.element_spec == ts.data.PerReplicaSpec((ts.data.TensorSpec((2,), torch.float32),) * 2)
    shapes = []

    def train_step(inputs: torch.Tensor) -> None:
        shapes.append(tuple(inputs.shape))

    for x in dist_dataset:
        strategy.run(train_step, args=(x,))
    assert set(shapes) == {(2,)}


def test_distribute_datasets_from_function(strategy: ts.TPUStrategy) -> None:
    global_batch_size = 8

    def dataset_fn(input_context: ts.InputContext) -> ts.data.Pipeline:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = ts.data.ArrayDataset(torch.tensor([[[1.0]]])).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)

    def replica_fn(batch: torch.Tensor) -> torch.Tensor:
        return batch.sum()

    for _, batch in zip(range(2), inputs, strict=False):
        replica_results = strategy.run(replica_fn, args=(batch,))
        assert [float(one) for one in strategy.local_results(replica_results)] == [4.0, 4.0]


def test_element_spec_of_a_distributed_iterator(strategy: ts.TPUStrategy) -> None:
    steps = 3
    inputs = strategy.experimental_distribute_datasets_from_function(
        lambda _: ts.data.ArrayDataset(torch.zeros(1, 3)).repeat().batch(4)
    )
    iterator = iter(inputs)
    assert iterator.element_spec == inputs.element_spec
    [first, _] = iterator.element_spec.values
    assert (first.shape[1:], first.dtype) == ((3,), torch.float32)

    def replica_fn_with_signature(batch: torch.Tensor) -> torch.Tensor:
        return torch.tensor(float(batch.shape[0]))

    for _ in range(steps):
        result = strategy.run(replica_fn_with_signature, args=(next(iterator),))
        assert [float(one) for one in strategy.local_results(result)] == [4.0, 4.0]


def test_make_numpy_dataset(strategy: ts.TPUStrategy) -> None:
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(4))  # the document's scalars have no rows
    assert sum(float(strategy.reduce("sum", batch, axis=0)) for batch in dist_dataset) == 10


# -- values ------------------------------------------------------------------------------------------------------------


def test_values_from_function_constant_per_replica(strategy: ts.TPUStrategy) -> None:
    distributed_values = strategy.experimental_distribute_values_from_function(lambda ctx: torch.tensor(1.0))
    assert strategy.experimental_local_results(distributed_values) == (torch.tensor(1.0), torch.tensor(1.0))


def test_values_from_function_by_replica_id(strategy: ts.TPUStrategy) -> None:
    array_value = np.array([3.0, 2.0, 1.0])
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda ctx: array_value[ctx.replica_id_in_sync_group]
    )
    assert strategy.experimental_local_results(distributed_values) == (3.0, 2.0)


def test_values_from_function_number_of_replicas(strategy: ts.TPUStrategy) -> None:
    distributed_values = strategy.experimental_distribute_values_from_function(lambda ctx: ctx.num_replicas_in_sync)
    assert strategy.experimental_local_results(distributed_values) == (2, 2)


def test_values_from_function_placed_on_devices(strategy: ts.TPUStrategy) -> None:
    # No `with tf.device(worker_devices[i])`: a core is no torch.device, and `run` moves what it is given.
    worker_devices = strategy.extended.worker_devices
    assert worker_devices == ("/task:0/device:TPU:0", "/task:0/device:TPU:1")
    multiple_values = [torch.tensor(1.0 + i) for i in range(strategy.num_replicas_in_sync)]

    def value_fn(ctx: ts.ValueContext) -> torch.Tensor:
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    result = strategy.run(lambda value: value * 10, args=(distributed_values,))
    assert [float(one) for one in strategy.local_results(result)] == [10.0, 20.0]


@pytest.mark.parametrize(("axis", "expected"), [(None, [4, 6, 8, 10]), (0, 28)])
def test_reduce(axis: int | None, expected: Any, strategy: ts.TPUStrategy) -> None:
    batch = next(iter(strategy.experimental_distribute_dataset([torch.arange(8)])))
    per_replica = strategy.run(lambda x: x * 1, args=(batch,))
    assert strategy.reduce(ts.ReduceOp.SUM, per_replica, axis=axis).tolist() == expected


def test_run_takes_plain_functions_and_options(strategy: ts.TPUStrategy) -> None:
    # TensorFlow needs a tf.function here. The options are TensorFlow's.
    options = ts.RunOptions(experimental_enable_dynamic_batch_size=True, experimental_bucketizing_dynamic_shape=False)
    result = strategy.run(lambda x, y: x + y, args=(torch.tensor(1.0),), kwargs={"y": 2.0}, options=options)
    assert {float(one) for one in strategy.local_results(result)} == {3.0}


def test_scope(strategy: ts.TPUStrategy) -> None:
    with strategy.scope() as current:
        assert current is strategy
        assert ts.get_strategy() is strategy
        variable = ts.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(variable)
    assert float(variable) == 1.0
