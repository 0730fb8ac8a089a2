"""What ``tf.distribute.coordinator`` holds: the coordinator of parameter servers, and what it returns."""

from torchstrat.parameter_server.coordinator import ClusterCoordinator
from torchstrat.parameter_server.remote_value import PerWorkerValues, RemoteValue
from torchstrat.parameter_server.worker.executor import current_worker_index as experimental_get_current_worker_index

PerWorkerValue = PerWorkerValues

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
