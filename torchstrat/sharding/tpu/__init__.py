"""TPUs: their topology, which cores make a replica, and how the system starts. `torchstrat.TPUStrategy` trains on them.

Everything here but `initialize_tpu_system` is pure and needs neither a TPU nor torch_xla.

Imports from `core`, `data`, `distributed`, `replicas` and `sharding`.
"""

import sys

from torchstrat.distributed.tpu_topology import Topology
from torchstrat.sharding.tpu.device_assignment import SINGLE_CORE_ASSIGNMENT, DeviceAssignment, DeviceOrderMode
from torchstrat.sharding.tpu.system import experimental_connect_to_cluster, initialize_tpu_system

__all__ = [
    "SINGLE_CORE_ASSIGNMENT",
    "DeviceAssignment",
    "DeviceOrderMode",
    "Topology",
    "experimental",
    "experimental_connect_to_cluster",
    "initialize_tpu_system",
]

experimental = sys.modules[__name__]
"""Where older TensorFlow programs look for these names."""
