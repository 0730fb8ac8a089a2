"""The names of `torchstrat.tpu` in the place where older TensorFlow programs look for them."""

from torchstrat.distributed.tpu_topology import Topology
from torchstrat.sharding.tpu.device_assignment import SINGLE_CORE_ASSIGNMENT, DeviceAssignment, DeviceOrderMode
from torchstrat.sharding.tpu.system import experimental_connect_to_cluster, initialize_tpu_system

__all__ = [
    "SINGLE_CORE_ASSIGNMENT",
    "DeviceAssignment",
    "DeviceOrderMode",
    "Topology",
    "experimental_connect_to_cluster",
    "initialize_tpu_system",
]
