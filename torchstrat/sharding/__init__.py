"""Cutting tensors over the logical devices of a replica: what is cut where, by which rules, and how to see it.

`grid` and `annotations` are what users say, `explain` prints which device will hold which piece. The two backends,
`dtensor` and `tpu`, know devices; the files here know none.

Imports from `core`.
"""

from torchstrat.sharding.grid import REPLICA_AXIS, DeviceGrid, Sharding, logical_axis

__all__ = ["REPLICA_AXIS", "DeviceGrid", "Sharding", "logical_axis"]
