"""Every call that TensorFlow's documents list, with the arguments and defaults that they list, on every strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import torchstrat as ts

REQUIRED = inspect.Parameter.empty
STRATEGIES = [
    ts.CentralStorageStrategy,
    ts.MirroredStrategy,
    ts.MultiWorkerMirroredStrategy,
    ts.OneDeviceStrategy,
    ts.ParameterServerStrategy,
    ts.TPUStrategy,
    type(ts.get_strategy()),
]
PER_WORKER = ts.InputReplicationMode.PER_WORKER

METHODS: dict[str, dict[str, Any]] = {
    "distribute_datasets_from_function": {"dataset_fn": REQUIRED, "options": None},
    "experimental_assign_to_logical_device": {"tensor": REQUIRED, "logical_device_id": REQUIRED},
    "experimental_distribute_dataset": {"dataset": REQUIRED, "options": None},
    "experimental_distribute_datasets_from_function": {"dataset_fn": REQUIRED},
    "experimental_distribute_values_from_function": {"value_fn": REQUIRED},
    "experimental_local_results": {"value": REQUIRED},
    "experimental_make_numpy_dataset": {"numpy_input": REQUIRED, "session": None},
    "experimental_replicate_to_logical_devices": {"tensor": REQUIRED},
    "experimental_run": {"fn": REQUIRED, "input_iterator": None},
    "experimental_split_to_logical_devices": {"tensor": REQUIRED, "partition_dimensions": REQUIRED},
    "gather": {"value": REQUIRED, "axis": REQUIRED},
    "make_dataset_iterator": {"dataset": REQUIRED},
    "make_input_fn_iterator": {"input_fn": REQUIRED, "replication_mode": PER_WORKER},
    "reduce": {"reduce_op": REQUIRED, "value": REQUIRED, "axis": None},  # the v1 document's default, everywhere
    "run": {"fn": REQUIRED, "args": (), "kwargs": None, "options": None},
    "scope": {},
    "update_config_proto": {"config_proto": REQUIRED},
}
OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "CentralStorageStrategy": (ts.CentralStorageStrategy, {"compute_devices": None, "parameter_device": None}),
    "ParameterServerStrategy": (
        ts.ParameterServerStrategy,
        {"cluster_resolver": REQUIRED, "variable_partitioner": None},
    ),
    "TPUStrategy": (ts.TPUStrategy, {"tpu_cluster_resolver": None, "device_assignment": None}),
    "ClusterCoordinator": (ts.ClusterCoordinator, {"strategy": REQUIRED}),
    "schedule": (ts.ClusterCoordinator.schedule, {"self": REQUIRED, "fn": REQUIRED, "args": (), "kwargs": None}),
    "create_per_worker_dataset": (
        ts.ClusterCoordinator.create_per_worker_dataset,
        {"self": REQUIRED, "dataset_fn": REQUIRED},
    ),
    "Server": (
        ts.Server,
        {"cluster_spec": REQUIRED, "job_name": None, "task_index": None, "protocol": None},
    ),
    "TPUClusterResolver": (ts.cluster_resolver.TPUClusterResolver, {"tpu": None}),
    "initialize_tpu_system": (ts.tpu.experimental.initialize_tpu_system, {"cluster_resolver": None}),
    "FixedShardsPartitioner": (ts.partitioners.FixedShardsPartitioner, {"num_shards": REQUIRED}),
    "MinSizePartitioner": (ts.partitioners.MinSizePartitioner, {"min_shard_bytes": 256 << 10, "max_shards": 1}),
    "all_reduce": (ts.ReplicaContext.all_reduce, {"self": REQUIRED, "reduce_op": REQUIRED, "value": REQUIRED}),
    "all_gather": (ts.ReplicaContext.all_gather, {"self": REQUIRED, "value": REQUIRED, "axis": REQUIRED}),
    "reduce_to": (
        ts.StrategyExtended.reduce_to,
        {"self": REQUIRED, "reduce_op": REQUIRED, "value": REQUIRED, "destinations": REQUIRED},
    ),
    "batch_reduce_to": (
        ts.StrategyExtended.batch_reduce_to,
        {"self": REQUIRED, "reduce_op": REQUIRED, "value_destination_pairs": REQUIRED},
    ),
    "colocate_vars_with": (
        ts.StrategyExtended.colocate_vars_with,
        {"self": REQUIRED, "colocate_with_variable": REQUIRED},
    ),
    "call_for_each_replica": (
        ts.StrategyExtended.call_for_each_replica,
        {"self": REQUIRED, "fn": REQUIRED, "args": (), "kwargs": None},
    ),
}


def assert_takes(function: Callable[..., Any], documented: dict[str, Any]) -> None:
    """The documented arguments come first, by position and by name; what is added has a default."""
    parameters = list(inspect.signature(function).parameters.values())
    own, added = parameters[: len(documented)], parameters[len(documented) :]
    assert [(one.name, one.default) for one in own] == list(documented.items())
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in own)
    assert all(one.default is not REQUIRED for one in added)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", METHODS)
def test_methods_of_strategies(name: str, strategy: type[ts.Strategy]) -> None:
    assert_takes(getattr(strategy, name), {"self": REQUIRED, **METHODS[name]})


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_documents_refer_to(name: str) -> None:
    assert_takes(*OTHERS[name])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", ["cluster_resolver", "num_replicas_in_sync"])
def test_attributes_of_strategies(name: str, strategy: type[ts.Strategy]) -> None:
    attribute = inspect.getattr_static(strategy, name)
    assert isinstance(attribute, property)
    assert attribute.fset is None


def test_what_contexts_and_options_have() -> None:
    assert ts.InputContext().num_input_pipelines == 1
    assert ts.InputContext().input_pipeline_id == 0
    assert (ts.ValueContext().replica_id_in_sync_group, ts.ValueContext().num_replicas_in_sync) == (0, 1)
    options = ts.RunOptions()
    assert options.experimental_enable_dynamic_batch_size is True
    assert options.experimental_bucketizing_dynamic_shape is False
    assert options.experimental_xla_options is None
    assert {mode.name for mode in ts.InputReplicationMode} == {"PER_WORKER", "PER_REPLICA"}
    assert {policy.name for policy in ts.AutoShardPolicy} == {"OFF", "AUTO", "FILE", "DATA", "HINT"}
    assert [(op.name, op.value) for op in ts.ReduceOp] == [("SUM", "SUM"), ("MEAN", "MEAN")]
