"""torchstrat: one plain PyTorch training step, and a strategy that decides where variables live and replicas run.

Importing this package touches no device, reads no environment and starts nothing.
"""

import importlib
import sys
import typing

from torchstrat import core

with core.without_collection():
    from torchstrat import data
    from torchstrat.checkpoint import Checkpoint, CheckpointManager, SaveHandle, consolidate, evaluation
    from torchstrat.checkpoint.evaluation import SidecarEvaluator
    from torchstrat.checkpoint.preemption import PreemptionHandler
    from torchstrat.core import __version__ as __version__
    from torchstrat.core import errors
    from torchstrat.core.context import RunOptions, experimental_set_strategy, has_strategy, in_cross_replica_context
    from torchstrat.core.errors import OutOfRangeError
    from torchstrat.core.ftrl import Ftrl
    from torchstrat.core.losses import compute_average_loss, global_mean, scale_regularization_loss
    from torchstrat.core.reduction import ReduceOp, VariableAggregation, VariableSynchronization
    from torchstrat.core.terminal import progress
    from torchstrat.core.values import DistributedValues, Mirrored, PerReplica, ValueContext
    from torchstrat.core.variable.variable import Variable
    from torchstrat.data.distributed import DistributedDataset, DistributedIterator
    from torchstrat.data.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
    from torchstrat.distributed import cluster_resolver
    from torchstrat.parameter_server import partitioners
    from torchstrat.parameter_server.embedding import (
        embedding_lookup,
        embedding_lookup_sparse,
        grow_rows,
        prefetch_rows,
        safe_embedding_lookup_sparse,
    )
    from torchstrat.parameter_server.leases.dataset import LeasedDataset, Ledger
    from torchstrat.parameter_server.leases.lease import Lease
    from torchstrat.parameter_server.membership.task_server import Server
    from torchstrat.parameter_server.remote_value import PerWorkerValues, RemoteValue
    from torchstrat.parameter_server.variables.sharded_variable import ShardedVariable
    from torchstrat.replicas.sync_batchnorm import convert_sync_batchnorm
    from torchstrat.sharding import tpu
    from torchstrat.sharding.explain import explain_sharding
    from torchstrat.strategies import extended, policy, registry
    from torchstrat.strategies import tf_coordinator as coordinator
    from torchstrat.strategies import tf_experimental as experimental
    from torchstrat.strategies.central_storage import CentralStorageStrategy
    from torchstrat.strategies.default import ReplicaContext, get_replica_context, get_strategy
    from torchstrat.strategies.estimates import estimate
    from torchstrat.strategies.extended import StrategyExtended
    from torchstrat.strategies.local_sgd import LocalSGDStrategy
    from torchstrat.strategies.mirrored import MirroredStrategy
    from torchstrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from torchstrat.strategies.one_device import OneDeviceStrategy
    from torchstrat.strategies.parameter_server import ParameterServerStrategy
    from torchstrat.strategies.strategy import Strategy
    from torchstrat.strategies.tf_coordinator import ClusterCoordinator
    from torchstrat.strategies.tpu import TPUStrategy

# The paths of modules that programs may have typed, beside those that they have in their folders.
for _name, _module in {
    "cluster_resolver": cluster_resolver,
    "coordinator": coordinator,
    "errors": errors,
    "evaluation": evaluation,
    "experimental": experimental,
    "experimental.coordinator": coordinator,
    "extended": extended,
    "partitioners": partitioners,
    "policy": policy,
    "registry": registry,
    "tpu": tpu,
    "tpu.experimental": tpu.experimental,
}.items():
    sys.modules[f"{__name__}.{_name}"] = _module

if typing.TYPE_CHECKING:
    from torchstrat import launch as launch
    from torchstrat import testing as testing


def __getattr__(name: str) -> typing.Any:
    if name in ("launch", "testing"):  # on first use: they start processes, and testing knows every part of the package
        return importlib.import_module(f"torchstrat.{name}")
    from torchstrat.strategies.tf_names import WITHOUT_COUNTERPART

    why = f": {WITHOUT_COUNTERPART[name]}" if name in WITHOUT_COUNTERPART else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")


__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "ClusterCoordinator",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Ftrl",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Lease",
    "LeasedDataset",
    "Ledger",
    "LocalSGDStrategy",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "OutOfRangeError",
    "ParameterServerStrategy",
    "PerReplica",
    "PerWorkerValues",
    "PreemptionHandler",
    "ReduceOp",
    "RemoteValue",
    "ReplicaContext",
    "RunOptions",
    "SaveHandle",
    "Server",
    "ShardedVariable",
    "SidecarEvaluator",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "compute_average_loss",
    "consolidate",
    "convert_sync_batchnorm",
    "coordinator",
    "data",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "errors",
    "estimate",
    "experimental",
    "experimental_set_strategy",
    "explain_sharding",
    "get_replica_context",
    "get_strategy",
    "global_mean",
    "grow_rows",
    "has_strategy",
    "in_cross_replica_context",
    "partitioners",
    "policy",
    "prefetch_rows",
    "progress",
    "registry",
    "safe_embedding_lookup_sparse",
    "scale_regularization_loss",
    "tpu",
]
