"""What ``tf.distribute.experimental.coordinator`` holds: the coordinator of parameter servers, and what it returns."""

from torchstrat.parameter_server.coordinator import ClusterCoordinator
from torchstrat.parameter_server.per_worker import PerWorkerValues
from torchstrat.parameter_server.remote_value import RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
