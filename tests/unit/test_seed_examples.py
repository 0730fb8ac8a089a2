"""The programs of TensorFlow's documents on CentralStorageStrategy (2.3 and v1) and on what all strategies share.

Each test is one example, translated line by line, and checks what the document prints; where torchstrat promises
something else, that. ``tf.constant`` is a tensor, ``GPU:0`` a virtual replica ``cpu:0``, and ``tf.function`` nothing:
steps run as they stand. `test_compat` runs the v1 document's programs on every strategy; the documents of parameter
servers and of TPUs have files of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import torchstrat as ts
from tests.unit.data_ranks import layout_in_process
from torchstrat.data import distribute_dataset
from torchstrat.errors import InvalidArgumentError

Devices = list[str]
ONE, TWO = ["cpu:0"], ["cpu:0", "cpu:1"]


@pytest.fixture
def make() -> Iterator[Callable[..., ts.Strategy]]:
    """Make a strategy of that class; it is closed at the end."""
    made: list[ts.Strategy] = []

    def of(kind: Callable[..., ts.Strategy], *args: Any, **kwargs: Any) -> ts.Strategy:
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield of
    for strategy in made:
        strategy.close()


def dataset_range(count: int) -> ts.data.ArrayDataset:
    """``tf.data.Dataset.range``."""
    return ts.data.ArrayDataset(torch.arange(count))


def shown(strategy: ts.Strategy, value: Any) -> list[Any]:
    """The components of a value as plain Python."""
    return [
        one.tolist() if isinstance(one, torch.Tensor | np.generic) else one for one in strategy.local_results(value)
    ]


# -- CentralStorageStrategy, TensorFlow 2.3 ---------------------------------------------------------------------------


def test_central_storage_for_example(make: Any) -> None:
    strategy = make(ts.experimental.CentralStorageStrategy)
    # Create a dataset
    ds = dataset_range(5).batch(2)
    # Distribute that dataset
    dist_dataset = strategy.experimental_distribute_dataset(ds)
    results = []

    with strategy.scope():

        def train_step(val: torch.Tensor) -> torch.Tensor:
            return val + 1

        # Iterate over the distributed dataset
        for x in dist_dataset:
            # process dataset elements
            results.append(strategy.run(train_step, args=(x,)))
    # One replica, unless this machine has several GPUs; then some have no rows of the last batch, and are left out.
    found = [[row for part in shown(strategy, result) for row in part or []] for result in results]
    assert found == [[1, 2], [3, 4], [5]]


def test_cluster_resolver_of_a_single_worker_strategy(make: Any) -> None:
    assert make(ts.CentralStorageStrategy).cluster_resolver is None
    assert make(ts.MirroredStrategy, TWO).cluster_resolver is None


@pytest.mark.parametrize("kind", ["worker", "ps"])
def test_cluster_resolver_tells_the_task_type(kind: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps(
            {
                # The document's cluster has two workers; one is enough to ask who this is, and waits for nobody.
                "cluster": {"worker": ["localhost:12345"], "ps": ["localhost:34567"]},
                "task": {"type": kind, "index": 0},
            }
        ),
    )
    # This implicitly uses TF_CONFIG for the cluster and current task info.
    if kind == "worker":
        resolver = make(ts.experimental.MultiWorkerMirroredStrategy).cluster_resolver
    else:  # a server takes no part in the workers' collectives, so it has no such strategy
        resolver = ts.cluster_resolver.TFConfigClusterResolver()
    branch = None
    if resolver.task_type == "worker":
        branch = "something that's only applicable on workers"
    elif resolver.task_type == "ps":
        branch = "something that's only applicable on parameter servers"
    assert branch is not None
    assert ("workers" in branch) == (kind == "worker")
    assert resolver.cluster_spec().as_dict()["ps"] == ["localhost:34567"]


def test_distribute_dataset_with_one_compute_device(make: Any) -> None:
    strategy = make(ts.CentralStorageStrategy, ONE)  # the document has 1 CPU and 1 GPU, so one compute device
    dataset = dataset_range(10).batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    assert [x.tolist() for x in dist_dataset] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_distribute_dataset_with_two_compute_devices(make: Any) -> None:
    strategy = make(ts.CentralStorageStrategy, TWO)
    dist_dataset = strategy.experimental_distribute_dataset(dataset_range(10).batch(4))
    assert [shown(strategy, x) for x in dist_dataset] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_distribute_datasets_from_function(devices: Devices, make: Any) -> None:
    strategy, global_batch_size = make(ts.CentralStorageStrategy, devices), 6
    contexts = []

    def dataset_fn(input_context: ts.InputContext) -> ts.data.Pipeline:
        contexts.append(input_context)
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = ts.data.ArrayDataset(torch.tensor([[[1.0]]])).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    def replica_fn(batch: torch.Tensor) -> torch.Tensor:
        return batch.sum()

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    for _, batch in zip(range(3), inputs, strict=False):
        replica_results = strategy.run(replica_fn, args=(batch,))
        assert shown(strategy, replica_results) == [6 / len(devices)] * len(devices)
    assert contexts == [ts.InputContext(1, 0, len(devices))]  # once for the one worker


def test_reduce_of_unbatched_elements_is_an_error(make: Any) -> None:
    # The document distributes range(10) as it is. Elements without rows cannot be split over two replicas, neither here
    # nor in TensorFlow, where it fails inside of the dataset.
    strategy = make(ts.CentralStorageStrategy, compute_devices=TWO, parameter_device="cpu:0")
    with pytest.raises(ValueError, match="batch"):
        list(strategy.experimental_distribute_dataset(dataset_range(10)))


def test_reduce(make: Any) -> None:
    strategy = make(ts.CentralStorageStrategy, compute_devices=TWO, parameter_device="cpu:0")
    ds = dataset_range(8).batch(8)  # with the batch that the document means
    dist_dataset = strategy.experimental_distribute_dataset(ds)

    with strategy.scope():

        def train_step(val: torch.Tensor) -> torch.Tensor:
            return val  # pass through

        for x in dist_dataset:
            per_replica = strategy.run(train_step, args=(x,))

    result = strategy.reduce(ts.ReduceOp.SUM, per_replica, axis=None).numpy()
    assert result.tolist() == [4, 6, 8, 10]
    assert strategy.reduce(ts.ReduceOp.SUM, per_replica, axis=0).numpy() == 28
    # The document reduces the first result once more. That is one array and not a value per replica: each of the two
    # replicas contributes all of it.
    assert strategy.reduce(ts.ReduceOp.SUM, result, axis=0) == 2 * 28


def test_a_last_partial_batch_has_the_denominator_of_its_rows(make: Any) -> None:
    strategy = make(ts.CentralStorageStrategy, TWO)
    partial = ts.PerReplica([torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])])
    with pytest.raises(InvalidArgumentError, match="shapes must be equal"):
        strategy.reduce("mean", partial, axis=None)
    assert strategy.reduce("mean", partial, axis=0).item() == 15 / 6
    assert strategy.reduce("sum", partial, axis=0).item() == 15


def test_run_calls_the_function_on_each_compute_replica(make: Any) -> None:
    strategy = make(ts.CentralStorageStrategy, TWO)
    values = strategy.experimental_distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group + 1)
    result = strategy.run(
        lambda x, y: {"sum": torch.tensor(x + y)}, args=(values,), kwargs={"y": 10}, options=ts.RunOptions()
    )
    assert shown(strategy, result["sum"]) == [11, 12]


# -- what every document shows on MirroredStrategy --------------------------------------------------------------------


def test_distribute_dataset_prints_per_replica_values(make: Any) -> None:
    global_batch_size = 2
    strategy = make(ts.MirroredStrategy, devices=TWO)
    dataset = dataset_range(4).batch(global_batch_size)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    def replica_fn(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    result = [strategy.run(replica_fn, args=(x,)) for x in dist_dataset]
    assert str(result) == (
        "[PerReplica:{\n  0: tensor([0]),\n  1: tensor([2])\n}, PerReplica:{\n  0: tensor([4]),\n  1: tensor([6])\n}]"
    )
    assert all(isinstance(one, ts.DistributedValues) for one in result)


def test_a_distributed_dataset_takes_no_more_transformations(make: Any) -> None:
    dist_dataset = make(ts.MirroredStrategy, TWO).experimental_distribute_dataset(dataset_range(4).batch(2))
    assert isinstance(dist_dataset, ts.DistributedDataset)
    assert not [name for name in ("map", "batch", "shuffle", "repeat") if hasattr(dist_dataset, name)]


def test_a_buffer_of_as_many_batches_as_there_are_replicas(make: Any) -> None:
    # Where batches are copied, the next global batch (one part for each replica) is on its way while this one is used.
    reads: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(10):
            reads.append(number)
            yield torch.full((4,), number)

    elsewhere = layout_in_process(2, devices=(torch.device("meta"),) * 2)
    iterator = iter(distribute_dataset(make(ts.MirroredStrategy, TWO), elsewhere, batches(), None))
    for step in range(3):
        next(iterator)
        assert reads[-1] == step + 1
    iterator.close()


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_values_from_function_constant_per_replica(devices: Devices, make: Any) -> None:
    strategy = make(ts.MirroredStrategy, devices)

    def value_fn(ctx: ts.ValueContext) -> torch.Tensor:
        return torch.tensor(1.0)

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert local_result == (torch.tensor(1.0),) * len(devices)


@pytest.mark.parametrize(("devices", "expected"), [(ONE, (3.0,)), (TWO, (3.0, 2.0))])
def test_values_from_function_by_replica_id(devices: Devices, expected: tuple[float, ...], make: Any) -> None:
    strategy = make(ts.MirroredStrategy, devices)
    array_value = np.array([3.0, 2.0, 1.0])

    def value_fn(ctx: ts.ValueContext) -> Any:
        return array_value[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    assert strategy.experimental_local_results(distributed_values) == expected


@pytest.mark.parametrize(("devices", "expected"), [(ONE, (1,)), (TWO, (2, 2))])
def test_values_from_function_number_of_replicas(devices: Devices, expected: tuple[int, ...], make: Any) -> None:
    strategy = make(ts.MirroredStrategy, devices)

    def value_fn(ctx: ts.ValueContext) -> int:
        return ctx.num_replicas_in_sync

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    assert strategy.experimental_local_results(distributed_values) == expected


def test_values_from_function_placed_on_devices(make: Any) -> None:
    strategy = make(ts.MirroredStrategy, TWO)
    worker_devices = strategy.extended.worker_devices
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        with torch.device(worker_devices[i]):
            multiple_values.append(torch.tensor(1.0 + i))

    def value_fn(ctx: ts.ValueContext) -> torch.Tensor:
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    components = strategy.local_results(distributed_values)
    assert all(component is value for component, value in zip(components, multiple_values, strict=True))


def test_make_numpy_dataset(make: Any) -> None:
    strategy = make(ts.MirroredStrategy, TWO)
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    assert dataset.element_spec == ts.data.TensorSpec((), torch.float32)
    dataset = dataset.batch(2)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    assert [shown(strategy, batch) for batch in dist_dataset] == [[[1.0], [1.0]]] * 5


def test_gather(make: Any) -> None:
    strategy = make(ts.MirroredStrategy, TWO)
    # A DistributedValues with component tensor of shape (2, 1) on each replica
    distributed_values = strategy.experimental_distribute_values_from_function(lambda _: torch.tensor([[1], [2]]))

    def run() -> torch.Tensor:
        return strategy.gather(distributed_values, axis=0)

    assert run().tolist() == [[1], [2], [1], [2]]


@pytest.mark.parametrize(
    ("axis", "shape", "expected"),
    [
        (0, (4, 2, 3), [[[0, 1, 2], [3, 4, 5]]] * 4),
        (1, (1, 8, 3), [[[0, 1, 2], [3, 4, 5]] * 4]),
        (2, (1, 2, 12), [[[0, 1, 2] * 4, [3, 4, 5] * 4]]),
        (-1, (1, 2, 12), [[[0, 1, 2] * 4, [3, 4, 5] * 4]]),  # beyond the document, which asks for axis ≥ 0
    ],
)
def test_gather_along_each_axis(axis: int, shape: tuple[int, ...], expected: list[Any], make: Any) -> None:
    strategy = make(ts.MirroredStrategy, [f"cpu:{index}" for index in range(4)])
    single_tensor = torch.arange(6).reshape(1, 2, 3)
    distributed_values = strategy.experimental_distribute_values_from_function(lambda _: single_tensor.clone())
    gathered = strategy.gather(distributed_values, axis=axis)
    assert gathered.shape == shape
    assert gathered.tolist() == expected


def test_gather_of_different_shapes(make: Any) -> None:
    strategy = make(ts.MirroredStrategy, TWO)
    values = ts.PerReplica([torch.zeros(1, 2, 3), torch.zeros(1, 3, 3)])
    assert strategy.gather(values, axis=1).shape == (1, 5, 3)
    for axis in (0, 2):
        with pytest.raises(InvalidArgumentError, match="all dimensions but that one must be equal"):
            strategy.gather(values, axis=axis)


def test_reduce_of_replica_ids_and_where_results_are(make: Any) -> None:
    strategy = make(ts.MirroredStrategy, devices=TWO)

    def step_fn() -> torch.Tensor:
        context = ts.get_replica_context()
        assert context is not None
        return torch.tensor(context.replica_id_in_sync_group)

    per_replica_result = strategy.run(step_fn)
    # Check devices on which per replica result is:
    assert [one.device.type for one in strategy.experimental_local_results(per_replica_result)] == ["cpu", "cpu"]
    total = strategy.reduce("SUM", per_replica_result, axis=None)
    assert total == 1
    # Check device on which reduced result is:
    assert total.device == torch.device("cpu")


def test_run_on_a_constant(make: Any) -> None:
    strategy = make(ts.MirroredStrategy, TWO)
    tensor_input = torch.tensor(3.0)
    result = strategy.run(lambda value: value * 2.0, args=(tensor_input,))
    assert repr(result) == "PerReplica:{\n  0: tensor(6.),\n  1: tensor(6.)\n}"


def test_run_on_distributed_values(make: Any) -> None:
    strategy = make(ts.MirroredStrategy, TWO)

    def run() -> Any:
        def value_fn(value_context: ts.ValueContext) -> int:
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(value: int) -> int:
            return value * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    assert run() == 4  # the Python number that both replicas returned; a tensor only inside of a tf.function


def test_run_with_all_reduce(make: Any) -> None:
    strategy = make(ts.MirroredStrategy, TWO)

    def run() -> Any:
        def value_fn(value_context: ts.ValueContext) -> torch.Tensor:
            return torch.tensor(value_context.replica_id_in_sync_group)

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn(value: torch.Tensor) -> torch.Tensor:
            context = ts.get_replica_context()
            assert context is not None
            return context.all_reduce("sum", value)

        return strategy.run(replica_fn, args=(distributed_values,))

    assert repr(run()) == "PerReplica:{\n  0: tensor(1),\n  1: tensor(1)\n}"


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_scope(devices: Devices, make: Any) -> None:
    strategy = make(ts.MirroredStrategy, devices)
    # Variable created inside scope:
    with strategy.scope() as current:
        assert current is strategy
        assert ts.get_strategy() is strategy
        assert ts.in_cross_replica_context()
        mirrored_variable = ts.Variable(1.0)
    assert shown(strategy, mirrored_variable) == [1.0] * len(devices)
    # Variable created outside scope:
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


def test_datasets_functions_and_saving_may_stand_in_or_out_of_the_scope(make: Any, tmp_path: Any) -> None:
    strategy = make(ts.CentralStorageStrategy, TWO)
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        ts.Checkpoint(model=model).save(tmp_path / "inside")
    before = model.weight.detach().clone()
    ts.Checkpoint(model=model).save(tmp_path / "outside")
    for path in ("inside", "outside"):
        torch.nn.init.zeros_(model.weight)
        ts.Checkpoint(model=model).restore(tmp_path / path)
        assert torch.equal(model.weight, before)


# -- the v1 document's own ---------------------------------------------------------------------------------------------


def test_v1_make_input_fn_iterator(make: Any) -> None:
    strategy, global_batch_size = make(ts.CentralStorageStrategy, TWO), 8

    def input_fn(input_context: ts.InputContext) -> ts.data.Pipeline:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = ts.data.ArrayDataset(torch.tensor([[[1.0]]])).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn, replication_mode=ts.InputReplicationMode.PER_WORKER)
        iterator.initialize()
        replica_results = strategy.experimental_run(lambda batch: batch.sum(), iterator)
    assert shown(strategy, replica_results) == [4.0, 4.0]


def test_v1_reduce_has_a_default_axis(make: Any) -> None:
    strategy = make(ts.CentralStorageStrategy, TWO)
    full = ts.PerReplica([torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5, 6, 7])])
    assert strategy.reduce("sum", full).tolist() == [4, 6, 8, 10]


def test_v1_update_config_proto_returns_a_changed_copy(make: Any) -> None:
    given = {"allow_soft_placement": True}
    changed = make(ts.CentralStorageStrategy, TWO).update_config_proto(config_proto=given)
    assert changed == {"allow_soft_placement": True, "isolate_session_state": True}
    assert given == {"allow_soft_placement": True}
