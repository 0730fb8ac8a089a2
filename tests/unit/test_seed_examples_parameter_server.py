"""The example programs of TensorFlow 2.4's document on ParameterServerStrategy, over a cluster of threads.

Those that are programs, translated line by line; ``cluster.strategy(...)`` stands for
``ts.ParameterServerStrategy(resolver, ...)``. Where variables and shards are placed and what partitioners answer is
recorded in tests/conformance (ps_placement, ps_partition, partitioner), what the document shows on MirroredStrategy is
in `test_seed_examples`.
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
    strategy = cluster.strategy(variable_partitioner=MinSizePartitioner(min_shard_bytes=8, max_shards=3))
    coordinator = ClusterCoordinator(strategy=strategy)
    distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn=dataset_fn)

    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = ts.Variable(0.0, aggregation=ts.VariableAggregation.SUM)  # the metric
        epochs = ts.Variable(0)
        checkpoint = ts.Checkpoint(model=model, optimizer=optimizer, epochs=epochs)

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
    for _ in range(int(epochs), num_epoch):
        distributed_iterator = iter(distributed_dataset)  # Reset iterator state.
        for _ in range(steps_per_epoch):
            coordinator.schedule(worker_fn, args=(distributed_iterator,))
        coordinator.join()
        assert coordinator.done()
        results.append(float(losses) / steps_per_epoch)
        losses.assign(0.0)
        epochs.assign_add(1)
        checkpoint.save(tmp_path / "latest")
    assert len(results) == num_epoch
    assert results[-1] < results[0] / 4
    epochs.assign(0)
    checkpoint.restore(tmp_path / "latest")
    assert int(epochs) == num_epoch


def test_worker_and_parameter_servers() -> None:
    resolver = ts.cluster_resolver.SimpleClusterResolver(
        ts.cluster_resolver.ClusterSpec(CLUSTER), task_type="worker", task_id=1
    )
    # `start=False`: the document's program goes on with `server.join()`, which never returns.
    job: dict[str, Any] = {"job_name": resolver.task_type, "task_index": resolver.task_id}
    server = ts.Server(resolver.cluster_spec(), **job, protocol="grpc", start=False)
    assert server.target == "grpc://worker1.example.com:2222"


@pytest.mark.parametrize("task", ["chief", "worker", "ps"])
def test_the_same_binary_for_all_tasks(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": task, "index": 0}}))
    resolver = ts.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == (task, 0)
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert resolver.master() == CLUSTER[task][0]
    if task == "chief":
        strategy = ts.experimental.ParameterServerStrategy(resolver)  # contacts nobody before its first scope
        assert strategy.cluster_resolver is resolver  # TensorFlow has None there
        strategy.close()
    else:
        ts.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, start=False)


class Dense(nn.Module):
    def __init__(self, name: str = "w") -> None:
        super().__init__()
        self.w: Any = ts.Variable(torch.randn([100, 10]), name=name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def test_variable_partitioning(cluster: FakeCluster) -> None:
    strategy = cluster.strategy(variable_partitioner=FixedShardsPartitioner(num_shards=2))
    with strategy.scope():
        dense = Dense()
    assert isinstance(dense.w, ts.ShardedVariable)
    assert [shard.name for shard in dense.w.variables] == ["w/part_0", "w/part_1"]
    # The container can be converted to a tensor, and be used where a tensor can.
    whole = torch.as_tensor(dense.w)
    assert torch.equal(dense(torch.tensor(2.0)), 2 * whole)
    assert torch.equal(whole, torch.cat([shard.read_value() for shard in dense.w.variables]))
    assert torch.equal(ts.embedding_lookup(dense.w, torch.tensor([99, 0, 5, 5])), whole[[99, 0, 5, 5]])


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
