"""torchstrat: one plain PyTorch training step, and a strategy that decides where variables live and replicas run.

Importing this package touches no device, reads no environment and starts nothing.
"""

from torchstrat import cluster_resolver, data, errors, registry
from torchstrat.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from torchstrat.data.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from torchstrat.errors import OutOfRangeError
from torchstrat.losses import compute_average_loss, scale_regularization_loss
from torchstrat.reduction import ReduceOp, VariableAggregation, VariableSynchronization
from torchstrat.run_options import RunOptions
from torchstrat.strategies.central_storage import CentralStorageStrategy
from torchstrat.strategies.mirrored import MirroredStrategy
from torchstrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from torchstrat.strategies.one_device import OneDeviceStrategy
from torchstrat.strategy import Strategy
from torchstrat.sync_batchnorm import convert_sync_batchnorm
from torchstrat.value_functions import ValueContext
from torchstrat.values import DistributedValues, Mirrored, PerReplica
from torchstrat.variable.variable import Variable

__version__ = "0.1.0"

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "DistributedValues",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "OutOfRangeError",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "compute_average_loss",
    "convert_sync_batchnorm",
    "data",
    "errors",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "registry",
    "scale_regularization_loss",
]
