"""The example programs of TensorFlow 2.4's document on ParameterServerStrategy, over a cluster of threads.

Each test is one example, translated line by line; ``cluster.strategy(...)`` stands for
``ts.ParameterServerStrategy(resolver, ...)``. What the document shows on MirroredStrategy is in `test_seed_examples`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrat as ts
from torchstrat.testing.fake_cluster import FakeCluster

FixedShardsPartitioner = ts.experimental.partitioners.FixedShardsPartitioner
MinSizePartitioner = ts.experimental.partitioners.MinSizePartitioner
ClusterCoordinator = ts.experimental.coordinator.ClusterCoordinator

CLUSTER = {
    "chief": ["chief.example.com:2222"],
    "ps": ["ps0.example.com:2222", "ps1.example.com:2222"],
    "worker": ["worker0.example.com:2222", "worker1.example.com:2222", "worker2.example.com:2222"],
}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(workers=3, ps=3) as cluster:
        yield cluster


def regression(seed: int = 0) -> torch.utils.data.DataLoader[Any]:
    """Rows ``(8,)`` and their sums, in batches of 16."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)


def dataset_fn() -> Any:
    """Shuffled and repeated, as the document recommends."""
    rows = regression().dataset.tensors  # type: ignore[attr-defined]
    return ts.data.ArrayDataset(rows).shuffle(64, seed=1).repeat().batch(16)


def test_coordinator(cluster: FakeCluster, tmp_path: Any) -> None:
    num_epoch, steps_per_epoch = 3, 24
    # Prepare a strategy to use with the cluster and variable partitioning info.
    strategy = cluster.strategy(variable_partitioner=MinSizePartitioner(min_shard_bytes=8, max_shards=3))
    coordinator = ClusterCoordinator(strategy=strategy)
    # Prepare a distribute dataset that will place datasets on the workers.
    distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn=dataset_fn)

    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = ts.Variable(0.0, aggregation=ts.VariableAggregation.SUM)  # the metric
        epochs = ts.Variable(0)
        checkpoint = ts.Checkpoint(model=model, optimizer=optimizer, epochs=epochs)
    initial_epoch = int(epochs)

    def worker_fn(iterator: Any) -> None:
        def replica_fn(inputs: Any) -> None:
            batch_data, labels = inputs
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch_data), labels)
            loss.backward()
            optimizer.step()
            losses.assign_add(loss.detach())

        strategy.run(replica_fn, args=(next(iterator),))

    results = []
    for _ in range(initial_epoch, num_epoch):
        distributed_iterator = iter(distributed_dataset)  # Reset iterator state.
        for _ in range(steps_per_epoch):
            # Asynchronously schedule the `worker_fn` to be executed on an arbitrary worker. This call returns
            # immediately.
            coordinator.schedule(worker_fn, args=(distributed_iterator,))
        # `join` blocks until all scheduled `worker_fn`s finish execution. Once it returns, we can read the metrics and
        # save checkpoints as needed.
        coordinator.join()
        assert coordinator.done()
        results.append(float(losses) / steps_per_epoch)
        losses.assign(0.0)
        epochs.assign_add(1)
        checkpoint.save(tmp_path / "latest")
    assert len(results) == num_epoch
    assert results[-1] < results[0] / 4

    # `load_checkpoint` infers the initial epoch.
    epochs.assign(0)
    checkpoint.restore(tmp_path / "latest")
    assert int(epochs) == num_epoch


def test_worker_and_parameter_servers() -> None:
    # Provide a cluster resolver that serves the cluster information.
    cluster_resolver = ts.cluster_resolver.SimpleClusterResolver(
        ts.cluster_resolver.ClusterSpec(CLUSTER), task_type="worker", task_id=1
    )
    # `start=False`: the document's program goes on with `server.join()`, which never returns.
    server = ts.Server(
        cluster_resolver.cluster_spec(),
        job_name=cluster_resolver.task_type,
        task_index=cluster_resolver.task_id,
        protocol="grpc",
        start=False,
    )
    assert server.target == "grpc://worker1.example.com:2222"


def test_cluster_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": 1}}))
    resolver = ts.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert resolver.master() == "ps1.example.com:2222"


@pytest.mark.parametrize(("task", "role"), [("chief", "coordinator"), ("worker", "server"), ("ps", "server")])
def test_the_same_binary_for_all_tasks(task: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": task, "index": 0}}))
    became = None
    cluster_resolver = ts.cluster_resolver.TFConfigClusterResolver()
    # If coordinator, create a strategy and start the training program.
    if cluster_resolver.task_type == "chief":
        strategy = ts.experimental.ParameterServerStrategy(cluster_resolver)  # contacts nobody before its first scope
        assert strategy.cluster_resolver is cluster_resolver  # TensorFlow has None there
        strategy.close()
        became = "coordinator"
    # If worker/ps, create a server
    elif cluster_resolver.task_type in ("worker", "ps"):
        ts.Server(cluster_resolver.cluster_spec(), cluster_resolver.task_type, cluster_resolver.task_id, start=False)
        became = "server"
    assert became == role


def test_variable_creation(cluster: FakeCluster) -> None:
    # In this example, we're assuming having 3 ps.
    strategy = cluster.strategy()
    ClusterCoordinator(strategy=strategy)

    # Variables should be created inside scope to be placed on parameter servers. If created outside scope such as `v1`
    # here, it would be placed on the coordinator.
    v1 = ts.Variable(initial_value=0.0)

    with strategy.scope():
        v2 = ts.Variable(initial_value=1.0)
        v3 = ts.Variable(initial_value=2.0)
        v4 = ts.Variable(initial_value=3.0)
        v5 = ts.Variable(initial_value=4.0)

    # v2 through v5 are created in scope and are distributed on parameter servers.
    device_of = strategy.extended.device_of  # `tf.Variable.device`: a torch.device cannot name a server
    assert device_of(v1) == "cpu:0"
    assert device_of(v2) == "ps:0"
    assert device_of(v3) == "ps:1"
    assert device_of(v4) == "ps:2"
    assert device_of(v5) == "ps:0"
    assert [float(variable) for variable in (v1, v2, v3, v4, v5)] == [0, 1, 2, 3, 4]


class Dense(nn.Module):
    def __init__(self, name: str = "w") -> None:
        super().__init__()
        self.w: Any = ts.Variable(torch.randn([100, 10]), name=name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def test_variable_partitioning(cluster: FakeCluster) -> None:
    # Partition the dense layer into 2 shards.
    variable_partitioner = FixedShardsPartitioner(num_shards=2)
    strategy = cluster.strategy(variable_partitioner=variable_partitioner)
    with strategy.scope():
        dense = Dense()
    assert isinstance(dense.w, ts.ShardedVariable)
    assert len(dense.w.variables) == 2
    assert isinstance(dense.w.variables[0], ts.Variable)
    assert isinstance(dense.w.variables[1], ts.Variable)
    assert dense.w.variables[0].name == "w/part_0"
    assert dense.w.variables[1].name == "w/part_1"
    # The container can be converted to a tensor, and be used where a tensor can.
    whole = torch.as_tensor(dense.w)
    assert torch.equal(dense(torch.tensor(2.0)), 2 * whole)
    assert torch.equal(whole, torch.cat([shard.read_value() for shard in dense.w.variables]))


def test_parallel_lookups_on_the_components(cluster: FakeCluster) -> None:
    strategy = cluster.strategy(FixedShardsPartitioner(num_shards=3))
    with strategy.scope():
        table: Any = ts.Variable(torch.arange(26.0).reshape(13, 2))
    assert ts.embedding_lookup(table, torch.tensor([12, 0, 5, 5])).tolist() == [[24, 25], [0, 1], [10, 11], [10, 11]]


def test_known_limitations_that_are_none_here(cluster: FakeCluster, tmp_path: Any) -> None:
    # "Number of partitions must not change across Checkpoint save/load": it may, and the whole value is one tensor.
    value = torch.arange(26.0).reshape(13, 2)
    strategies = [cluster.strategy(FixedShardsPartitioner(number)) for number in (2, 3)]
    saved, restored = ({}, {})
    for strategy, made, initial in zip(strategies, (saved, restored), (value, torch.zeros(13, 2)), strict=True):
        with strategy.scope():
            made["table"] = ts.Variable(initial)
        if made is saved:
            ts.Checkpoint(**made).save(tmp_path / "table")
            strategy.close()
    ts.Checkpoint(**restored).restore(tmp_path / "table")
    assert torch.equal(torch.as_tensor(restored["table"]), value)


def test_gradients_of_a_partitioned_parameter(cluster: FakeCluster) -> None:
    # "Partition variable doesn't directly work with GradientTape": a partitioned parameter trains as it stands.
    strategy = cluster.strategy(FixedShardsPartitioner(num_shards=2))
    with strategy.scope():
        model = nn.Linear(3, 4, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    coordinator = ClusterCoordinator(strategy)
    coordinator.schedule(step)
    coordinator.join()
    strategy.extended.pull()
    assert torch.equal(model.weight.detach(), torch.zeros(4, 3))


def test_dataset_preparation(cluster: FakeCluster) -> None:
    def numbers() -> Any:
        # Dataset is recommended to be shuffled, and repeated.
        return ts.data.ArrayDataset(torch.arange(6)).shuffle(buffer_size=6).repeat().batch(batch_size=6)

    coordinator = ClusterCoordinator(strategy=cluster.strategy())
    distributed_dataset = coordinator.create_per_worker_dataset(numbers)
    iterator = iter(distributed_dataset)
    with pytest.raises(NotImplementedError):
        next(iterator)  # the workers read, not the coordinator
    batch = coordinator.schedule(lambda it: next(it), args=(iterator,)).fetch()
    assert sorted(batch.tolist()) == list(range(6))


def test_div_partition_strategy(cluster: FakeCluster) -> None:
    # 13 ids over 5 shards: [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10], [11, 12]]
    strategy = cluster.strategy(variable_partitioner=FixedShardsPartitioner(5))
    with strategy.scope():
        ids: Any = ts.Variable(torch.arange(13))
        with strategy.extended.colocate_vars_with(ids.variables[0]):
            beside = ts.Variable(torch.arange(13))
    found = [shard.read_value().tolist() for shard in ids.variables]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10], [11, 12]]
    # Variables created under `colocate_vars_with` are not partitioned; nor are those with one partition.
    assert isinstance(beside, ts.Variable)


def test_the_partitioner_that_is_commonly_used(cluster: FakeCluster) -> None:
    num_ps = 3
    partitioner = MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=num_ps)
    strategy = cluster.strategy(variable_partitioner=partitioner)
    with strategy.scope():
        large: Any = ts.Variable(torch.zeros(3 << 16))
        small = ts.Variable(torch.zeros(100))
    assert [shard.shape[0] for shard in large.variables] == [1 << 16] * 3
    assert isinstance(small, ts.Variable)


def test_a_dataset_of_the_strategy_is_read_on_the_workers(cluster: FakeCluster) -> None:
    strategy = cluster.strategy()
    coordinator = ClusterCoordinator(strategy)

    def per_worker() -> Any:
        def of(context: ts.InputContext) -> Any:
            batch_size = context.get_per_replica_batch_size(2)
            d = ts.data.ArrayDataset(torch.arange(4)).batch(batch_size)
            return d.shard(context.num_input_pipelines, context.input_pipeline_id)

        return strategy.distribute_datasets_from_function(of, options=ts.InputOptions())

    iterator = iter(coordinator.create_per_worker_dataset(per_worker))
    assert coordinator.schedule(lambda it: next(it), args=(iterator,)).fetch().tolist() == [0, 1]
    for distributed in (
        strategy.experimental_distribute_dataset(regression(), options=None),
        strategy.distribute_datasets_from_function(lambda context: regression()),
    ):
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            iter(distributed)


def test_methods_in_a_scheduled_function(cluster: FakeCluster) -> None:
    strategy = cluster.strategy()
    coordinator = ClusterCoordinator(strategy)

    def worker_fn() -> Any:
        values = strategy.experimental_distribute_values_from_function(lambda context: context.num_replicas_in_sync)
        result = strategy.run(lambda value: torch.tensor([2.0 * value]), args=(values,))
        return {
            "local": strategy.experimental_local_results(result),
            "reduced": strategy.reduce("sum", result, axis=0),
            "gathered": strategy.gather(result, axis=0),
            "replicas": strategy.num_replicas_in_sync,
        }

    found = coordinator.schedule(worker_fn).fetch()
    assert (found["reduced"], found["gathered"].tolist(), found["replicas"]) == (2.0, [2.0], 1)
    assert [one.tolist() for one in found["local"]] == [[2.0]]
