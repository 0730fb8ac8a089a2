"""How a mesh of TPU cores is cut into replicas, and in which order the replicas and their cores are numbered.

A replica takes ``computation_shape`` cores, ``computation_stride`` apart along each axis, so that its footprint is
shape × stride. With a stride, footprints interleave: ``stride`` replicas share one footprint along that axis.

An order of chips in which each is next to the one before it, and the last next to the first.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.sharding.tpu.coordinates import MESH_RANK, Integers, MeshShape

Chip = tuple[int, int, int]


def ring_of_chips(x_size: int, y_size: int, z_size: int) -> list[Chip]:
    """All chips of a grid as a closed walk that begins at the origin; neighbours in the list are linked in the mesh.

    In the plane it goes to and fro over all columns but the first, and back through the first. Here 4 × 4 chips, x to
    the right, y downwards::

         0  1  2  3
        15  6  5  4
        14  7  8  9
        13 12 11 10

    In space the planes are walked one after the other without their corner, every second one backwards, and the way
    back is the edge of corners.

    Where more than one size is above 1 and one of these is odd, the order is x first, then y, then z: it is what
    TensorFlow does, although neighbours are then not always linked. Along a single axis it is the line.
    """
    sizes = [size for size in (x_size, y_size, z_size) if size > 1]
    if len(sizes) <= 1 or any(size % 2 for size in sizes):
        return [(x, y, z) for z in range(z_size) for y in range(y_size) for x in range(x_size)]
    ring = [(0, 0, 0)]
    if z_size == 1:
        return ring + [(x, y, 0) for x, y in _around(x_size, y_size)]
    if y_size == 1:
        return ring + [(x, 0, z) for x, z in _around(x_size, z_size)]
    if x_size == 1:
        return ring + [(0, y, z) for y, z in _around(y_size, z_size)]
    plane = _around(x_size, y_size)
    for z in range(z_size):
        ring += [(x, y, z) for x, y in (reversed(plane) if z % 2 else plane)]
    return ring + [(0, 0, z) for z in range(z_size - 1, 0, -1)]


def _around(columns: int, rows: int) -> list[tuple[int, int]]:
    """All points (column, row) of a grid but the origin, as a walk from (1, 0) to (0, 1). ``rows`` is even."""
    walk: list[tuple[int, int]] = []
    for row in range(rows):
        walk += [(column, row) for column in (range(columns - 1, 0, -1) if row % 2 else range(1, columns))]
    return walk + [(0, row) for row in range(rows - 1, 0, -1)]


CORE_AXIS_FIRST = (3, 0, 1, 2)


class DeviceOrderMode(enum.IntEnum):
    """The order of replicas, and of the cores within one."""

    AUTO = 0
    """`RING` where it is possible, else `MESH`."""
    RING = 1
    """Chips in a ring, in the replica and among replicas. Needs all cores of a chip in one replica, no stride, and as
    many replicas as fit into the mesh."""
    MESH = 2
    """Cores of a replica with the last axis fastest; replicas along the core axis first, then x, y and z."""


@dataclass(frozen=True)
class Tiling:
    """A mesh cut into footprints; all shapes are ``[x, y, z, core]`` with entries of at least 1.

    Raises:
        InvalidArgumentError: a footprint is larger than the mesh.
    """

    mesh_shape: MeshShape
    computation_shape: MeshShape
    computation_stride: MeshShape

    def __post_init__(self) -> None:
        if any(used > size for used, size in zip(self.footprint, self.mesh_shape, strict=True)):
            raise InvalidArgumentError(
                f"computation_shape {list(self.computation_shape)} with computation_stride "
                f"{list(self.computation_stride)} takes {list(self.footprint)} of the mesh "
                f"{list(self.mesh_shape)} (x, y, z, core); make it fit."
            )

    @property
    def footprint(self) -> tuple[int, ...]:
        """The part of the mesh, along each axis, over which the cores of one replica are spread."""
        return tuple(n * s for n, s in zip(self.computation_shape, self.computation_stride, strict=True))

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """How many replicas fit along each axis."""
        blocks = (size // used for size, used in zip(self.mesh_shape, self.footprint, strict=True))
        return tuple(block * stride for block, stride in zip(blocks, self.computation_stride, strict=True))

    @property
    def max_replicas(self) -> int:
        """How many replicas fit into the mesh."""
        return math.prod(self.replica_counts)

    @property
    def cores_per_replica(self) -> int:
        """The number of a replica's logical cores."""
        return math.prod(self.computation_shape)

    def cores(self, num_replicas: int, order: DeviceOrderMode) -> Integers:
        """The places ``(replica, logical core, 4)`` of ``num_replicas`` replicas. No core occurs twice.

        Raises:
            InvalidArgumentError: that many do not fit, or a ring is asked for and impossible.
        """
        if num_replicas > self.max_replicas:
            raise InvalidArgumentError(
                f"num_replicas={num_replicas} with computation_shape {list(self.computation_shape)} and "
                f"computation_stride {list(self.computation_stride)} do not fit into the mesh {list(self.mesh_shape)}; "
                f"{self.max_replicas} do. Ask for fewer replicas, or for fewer cores each."
            )
        obstacles = self._obstacles_to_a_ring(num_replicas)
        if order is DeviceOrderMode.RING and obstacles:
            raise InvalidArgumentError(
                f"device_order_mode RING is impossible here: {' and '.join(obstacles)}. Use AUTO or MESH."
            )
        ring = order is DeviceOrderMode.RING or (order is DeviceOrderMode.AUTO and not obstacles)
        return self._ring_order() if ring else self._mesh_order(num_replicas)

    def _obstacles_to_a_ring(self, num_replicas: int) -> list[str]:
        obstacles = []
        if self.computation_shape[-1] != self.mesh_shape[-1]:
            taken, cores = self.computation_shape[-1], self.mesh_shape[-1]
            obstacles.append(f"a replica takes {taken} of a chip's {cores} cores, not all")
        if math.prod(self.computation_stride) != 1:
            obstacles.append(f"computation_stride is {list(self.computation_stride)}, not all 1")
        if num_replicas != self.max_replicas:
            obstacles.append(f"num_replicas is {num_replicas}, not {self.max_replicas}, which is all that fit")
        return obstacles

    def _ring_order(self) -> Integers:
        """A ring of replicas, in each of which the chips are a ring, in each of which the cores are in order."""
        *block, cores = self.computation_shape
        corners = np.array(ring_of_chips(*self.replica_counts[:-1])) * block  # (replica, 3)
        chips = corners[:, None] + np.array(ring_of_chips(*block))  # (replica, chip, 3)
        chip_of_core = np.repeat(chips, cores, axis=1)  # (replica, logical core, 3)
        core = np.broadcast_to(np.arange(self.cores_per_replica) % cores, chip_of_core.shape[:-1])
        return np.concatenate([chip_of_core, core[..., None]], axis=-1)

    def _mesh_order(self, num_replicas: int) -> Integers:
        stride, footprint = np.array(self.computation_stride), np.array(self.footprint)
        place = _places(num_replicas, self._replica_grid(num_replicas))  # (replica, 4)
        first = place // stride * footprint + place % stride  # (replica, 4): a replica's first core
        within = np.indices(self.computation_shape).reshape(MESH_RANK, -1).T * stride  # (logical core, 4)
        return np.asarray(first[:, None] + within)

    def _replica_grid(self, num_replicas: int) -> list[int]:
        """How many replicas to place along each axis: as near to a cube as the mesh allows.

        The axes on which the fewest fit come first (of equals the core axis, then x, y, z). Each takes the root of what
        is left to place, rounded up, or all that fit.
        """
        grid, left = [1] * MESH_RANK, num_replicas
        by_count = sorted(CORE_AXIS_FIRST, key=lambda axis: self.replica_counts[axis])
        for axes_left, axis in zip(range(MESH_RANK, 0, -1), by_count, strict=True):
            side = math.ceil(left ** (1 / axes_left))
            grid[axis] = max(1, min(side, self.replica_counts[axis]))
            left = math.ceil(left / grid[axis])
        return grid


def _places(number: int, grid: list[int]) -> Integers:
    """The first ``number`` points of a grid, ``(number, 4)``, the core axis running fastest, then x, y and z."""
    left, columns = np.arange(number), [np.zeros(number, dtype=np.int64)] * MESH_RANK
    for axis in CORE_AXIS_FIRST:
        left, columns[axis] = np.divmod(left, grid[axis])
    return np.stack(columns, axis=-1)
