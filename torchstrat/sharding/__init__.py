"""Cutting tensors over the logical devices of a replica: what is cut where, by which rules, and how to see it."""

from torchstrat.sharding.grid import REPLICA_AXIS, DeviceGrid, Sharding, logical_axis

__all__ = ["REPLICA_AXIS", "DeviceGrid", "Sharding", "logical_axis"]
