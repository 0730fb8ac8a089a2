"""Replicas and their logical devices as a grid, and how a tensor is cut over it. Pure: no device is touched.

The grid's axes are ``replica`` and ``d0``, ``d1``, …: the logical devices of one replica, arranged for one partition.
A tensor split into ``partition_dimensions=(1, 4, 2)`` sees them as a 1 × 4 × 2 block, whose axes ``d0``, ``d1``, ``d2``
lie along its dimensions; another tensor may see the same devices as 8 × 1. Tiles are numbered row-major, so tile ``i``
of a replica is on its logical device ``i`` whatever the partition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchstrat.core.errors import InvalidArgumentError

REPLICA_AXIS = "replica"


def logical_axis(index: int) -> str:
    """The name of axis ``index`` of a replica's logical devices: ``d0``, ``d1``, …"""
    return f"d{index}"


@dataclass(frozen=True)
class DeviceGrid:
    """Which device is which replica's which logical device.

    ``devices[replica][logical]``: a number of the runtime's, each at most once; as many logical devices per replica.
    """

    devices: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        flat = [device for replica in self.devices for device in replica]
        if not flat or len({len(replica) for replica in self.devices}) != 1:
            raise InvalidArgumentError(
                "a grid of devices needs at least one replica, and as many logical devices in each; got "
                f"{self.devices}."
            )
        if len(set(flat)) != len(flat):
            raise InvalidArgumentError(f"a device can be in one place only; got {self.devices}.")

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @property
    def num_logical_devices(self) -> int:
        return len(self.devices[0])


@dataclass(frozen=True)
class Sharding:
    """How one tensor is cut over the devices of a `DeviceGrid`.

    ``axis_sizes``: the sizes of ``d0``, ``d1``, …, whose product is the number of logical devices.
    ``spec``: for each dimension of the tensor the axes that cut it, the slowest first; none: each device has all of it.
    """

    axis_sizes: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        used = [axis for axes in self.spec for axis in axes]
        if len(set(used)) != len(used):
            raise InvalidArgumentError(f"an axis can cut one dimension only, once; got {self.spec}.")

    @classmethod
    def replicated(cls, rank: int, num_logical_devices: int) -> Sharding:
        """Whole on every device."""
        return cls((num_logical_devices,), ((),) * rank)

    @classmethod
    def split(cls, partition_dimensions: Sequence[int]) -> Sharding:
        """``partition_dimensions[i]`` equal parts along dimension ``i``; their product is the number of devices."""
        sizes = tuple(partition_dimensions)
        spec = tuple((logical_axis(index),) if size > 1 else () for index, size in enumerate(sizes))
        return cls(sizes, spec)

    def stacked(self) -> Sharding:
        """For the tensor of all replicas: a new first dimension, one entry per replica, cut over the replicas."""
        return Sharding(self.axis_sizes, ((REPLICA_AXIS,), *self.spec))

    @property
    def rank(self) -> int:
        return len(self.spec)

    @property
    def is_replicated(self) -> bool:
        return not any(self.spec)

    def parts(self, num_replicas: int) -> tuple[int, ...]:
        """Into how many parts each dimension is cut."""
        return tuple(math.prod(self._size(axis, num_replicas) for axis in axes) for axes in self.spec)

    def tile_shape(self, shape: Sequence[int], num_replicas: int) -> tuple[int, ...]:
        """The shape of the piece on each device of a tensor of ``shape``, which has to divide."""
        return tuple(size // parts for size, parts in zip(shape, self.parts(num_replicas), strict=True))

    def tiles(self, shape: Sequence[int], grid: DeviceGrid) -> dict[int, tuple[slice, ...]]:
        """Device → the part of a tensor of ``shape`` that it holds."""
        if math.prod(self.axis_sizes) != grid.num_logical_devices:
            raise InvalidArgumentError(
                f"axes of sizes {self.axis_sizes} are for {math.prod(self.axis_sizes)} logical devices; a replica of "
                f"this grid has {grid.num_logical_devices}."
            )
        tile = self.tile_shape(shape, grid.num_replicas)
        found: dict[int, tuple[slice, ...]] = {}
        for replica, devices in enumerate(grid.devices):
            for logical, device in enumerate(devices):
                place = self._coordinates(replica, logical)
                slices = []
                for axes, size in zip(self.spec, tile, strict=True):
                    index = 0
                    for axis in axes:
                        index = index * self._size(axis, grid.num_replicas) + place[axis]
                    slices.append(slice(index * size, (index + 1) * size))
                found[device] = tuple(slices)
        return found

    def _size(self, axis: str, num_replicas: int) -> int:
        return num_replicas if axis == REPLICA_AXIS else self.axis_sizes[int(axis[1:])]

    def _coordinates(self, replica: int, logical: int) -> dict[str, int]:
        place = {REPLICA_AXIS: replica}
        for index in reversed(range(len(self.axis_sizes))):
            logical, place[logical_axis(index)] = divmod(logical, self.axis_sizes[index])
        return place
