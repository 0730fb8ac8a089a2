"""What ``tf.distribute.coordinator`` holds: the coordinator of parameter servers, and what it returns."""

from typing import TYPE_CHECKING

from torchstrat.parameter_server import coordinator
from torchstrat.parameter_server.remote_value import PerWorkerValues, RemoteValue
from torchstrat.parameter_server.worker.executor import current_worker_index as experimental_get_current_worker_index

if TYPE_CHECKING:  # as programs know it: the coordinator's own room is below that of strategies
    from torchstrat.strategies.parameter_server import ParameterServerStrategy

    class ClusterCoordinator(coordinator.ClusterCoordinator):
        strategy: ParameterServerStrategy

else:
    ClusterCoordinator = coordinator.ClusterCoordinator

PerWorkerValue = PerWorkerValues

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
