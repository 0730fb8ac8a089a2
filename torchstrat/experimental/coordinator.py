"""`torchstrat.coordinator` under its older path, ``tf.distribute.experimental.coordinator``."""

from torchstrat.coordinator import (
    ClusterCoordinator,
    PerWorkerValue,
    PerWorkerValues,
    RemoteValue,
    experimental_get_current_worker_index,
)

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
