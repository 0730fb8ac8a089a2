"""Which TPU cores make up which replica, and in which order both are numbered; public as `ts.tpu.DeviceAssignment`.

`DeviceAssignment.build` cuts the mesh into replicas. A replica takes ``computation_shape`` cores,
``computation_stride`` apart along each axis, so that its footprint is shape × stride. With a stride, footprints
interleave: ``stride`` replicas share one footprint along that axis. The cores are numbered along a ring of chips, where
there is one: each chip is next to the one before it, and the last next to the first.
"""

from __future__ import annotations

import enum
import math
import operator
from dataclasses import dataclass
from typing import SupportsIndex, final

import numpy as np

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.distributed.tpu_topology import MESH_RANK, Integers, MeshShape, Topology, frozen, integers, mesh_axes

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


SINGLE_CORE_ASSIGNMENT = [[[0, 0, 0, 0]]]
"""The ``core_assignment`` of one replica on the first core."""


@final
class DeviceAssignment:
    """Which core of a topology computes which logical core of which replica. Immutable; no accelerator is touched.

    Args:
        topology: The mesh.
        core_assignment: ``(replica, logical core, 4)``: a place ``[x, y, z, core]`` of the mesh for each. Negative
            entries count from the end of their axis; a place may be given more than once, see `device_indices`.

    Raises:
        WrongTypeError: ``core_assignment`` does not hold integers.
        InvalidArgumentError: ``topology`` is none; ``core_assignment`` has another shape, or names a place outside the
            mesh or without a device.
    """

    def __init__(self, topology: Topology, core_assignment: object) -> None:
        self._topology = _checked_topology(topology)
        assignment = integers("core_assignment", core_assignment)
        if assignment.ndim != 3 or assignment.shape[-1] != MESH_RANK:
            raise InvalidArgumentError(
                "core_assignment must have the shape (replicas, logical cores, 4), a place [x, y, z, core] for each "
                f"logical core; got the shape {list(assignment.shape)}."
            )
        self._core_assignment = frozen(assignment)
        self._device_indices = frozen(topology.device_indices_at(assignment))

    @staticmethod
    def build(
        topology: Topology | bytes,
        computation_shape: object = None,
        computation_stride: object = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Cut ``topology`` into replicas.

        In a mesh with missing devices the cores are taken in task order instead, whatever the order asked for:
        neighbours in the list are then not always neighbours in the mesh.

        Args:
            topology: The mesh, or its bytes.
            computation_shape: The cores of one replica along each axis, ``[x, y, z, core]``; three entries
                ``[x, y, core]`` mean ``[x, y, 1, core]``. None: one core.
            computation_stride: How far apart they are, in the same form; None: 1 along each axis.
            num_replicas: How many replicas; 0 gives an empty assignment.
            device_order_mode: See `DeviceOrderMode`.

        Raises:
            WrongTypeError: a shape or a number does not hold integers.
            InvalidArgumentError: ``topology`` is none; a shape has another length or an entry below 1; a replica, or
                that many, do not fit; the ring that was asked for is impossible; a stride, or a ring, in a mesh
                with missing devices.
        """
        topology = _checked_topology(Topology(serialized=topology) if isinstance(topology, bytes) else topology)
        one = (1,) * MESH_RANK
        shape = mesh_axes("computation_shape", one if computation_shape is None else computation_shape)
        stride = mesh_axes("computation_stride", one if computation_stride is None else computation_stride)
        replicas, order = _checked_number(num_replicas), _checked_order(device_order_mode)
        x, y, z, cores = topology.mesh_shape.tolist()
        tiling = Tiling((x, y, z, cores), shape, stride)
        if len(topology.missing_devices):
            return DeviceAssignment(topology, _in_task_order(topology, tiling, replicas, order))
        return DeviceAssignment(topology, tiling.cores(replicas, order))

    @property
    def topology(self) -> Topology:
        """The mesh."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self._core_assignment)

    @property
    def num_cores_per_replica(self) -> int:
        """The number of logical cores of each replica."""
        return int(self._core_assignment.shape[1])

    @property
    def core_assignment(self) -> Integers:
        """The place of each logical core, ``(replica, logical core, 4)``, read-only."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """The place ``(x, y, z, core)`` of a logical core. Negative numbers count from the end, as in all methods.

        Raises:
            InvalidArgumentError: there is no such replica or logical core; so do all methods below.
        """
        self._check_numbers(replica, logical_core)
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """The replicas, ascending, whose ``logical_core`` is driven by ``task_id``; never none.

        Raises:
            InvalidArgumentError: there is none.
        """
        if 0 <= logical_core < self.num_cores_per_replica:
            tasks = self._device_indices[:, logical_core] // self._topology.num_tpus_per_task
            replicas: list[int] = np.flatnonzero(tasks == task_id).tolist()
            if replicas:
                return replicas
        raise InvalidArgumentError(
            f"no replica has its logical core {logical_core} on task {task_id}; this assignment has "
            f"{self.num_replicas} replicas of {self.num_cores_per_replica} logical cores, on tasks {self._tasks()}."
        )

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """The number of a logical core's TPU among those of its task."""
        return self._topology.tpu_device_ordinal_at_coordinates(self.coordinates(replica, logical_core))

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """The CPU of the host of a logical core: ``/job:J/task:T/device:CPU:0``, the job only if given."""
        return self._topology.cpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job=job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """The TPU of a logical core: ``/job:J/task:T/device:TPU:D``, the job only if given."""
        return self._topology.tpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job=job)

    def device_indices(self) -> Integers:
        """The number of each logical core's device in task order, task × cores per task + ordinal.

        Returns:
            ``(replica, logical core)``, read-only. No number occurs twice, so that it can become a device mesh.

        Raises:
            InvalidArgumentError: a core was assigned more than once, and a device can compute for one only.
        """
        distinct, counts = np.unique(self._device_indices, return_counts=True)
        if len(distinct) < self._device_indices.size:
            raise InvalidArgumentError(
                f"core_assignment uses the devices {distinct[counts > 1].tolist()!r:.100} more than once; each can "
                "compute one logical core of one replica. Give every logical core its own place."
            )
        return self._device_indices

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceAssignment):
            return NotImplemented
        return self._topology == other.topology and np.array_equal(self._core_assignment, other.core_assignment)

    def __hash__(self) -> int:
        return hash((self._topology, self._core_assignment.shape, self._core_assignment.tobytes()))

    def __repr__(self) -> str:
        return (
            f"DeviceAssignment({self._topology!r}, num_replicas={self.num_replicas}, "
            f"num_cores_per_replica={self.num_cores_per_replica})"
        )

    def _tasks(self) -> list[int]:
        tasks: list[int] = np.unique(self._device_indices // self._topology.num_tpus_per_task).tolist()
        return tasks

    def _check_numbers(self, replica: int, logical_core: int) -> None:
        for name, number, size in (
            ("replica", replica, self.num_replicas),
            ("logical_core", logical_core, self.num_cores_per_replica),
        ):
            if not -size <= number < size:
                raise InvalidArgumentError(f"{name}={number} does not exist; there are {size}, numbered from 0.")


def _in_task_order(topology: Topology, tiling: Tiling, num_replicas: int, order: DeviceOrderMode) -> Integers:
    """Cores in the order of the tasks that drive them, cut into replicas: the mesh has holes, so no block is whole."""
    missing = f"the mesh lacks {len(topology.missing_devices)} devices, so cores are taken in task order"
    if max(tiling.computation_stride) > 1:
        raise InvalidArgumentError(
            f"{missing}; computation_stride {list(tiling.computation_stride)} has no meaning then, leave it out."
        )
    if order is DeviceOrderMode.RING:
        raise InvalidArgumentError(f"{missing}; device_order_mode RING is impossible then, use AUTO or MESH.")
    devices = topology.device_coordinates.reshape(-1, MESH_RANK)
    needed = num_replicas * tiling.cores_per_replica
    if num_replicas > tiling.max_replicas or needed > len(devices):
        raise InvalidArgumentError(
            f"num_replicas={num_replicas} with computation_shape {list(tiling.computation_shape)} need {needed} cores; "
            f"the mesh {list(tiling.mesh_shape)} fits {tiling.max_replicas} such replicas and has {len(devices)} cores."
        )
    return devices[:needed].reshape(num_replicas, tiling.cores_per_replica, MESH_RANK)


def _checked_topology(topology: object) -> Topology:
    if not isinstance(topology, Topology):
        raise InvalidArgumentError(
            f"topology must be a ts.tpu.Topology; got {type(topology).__name__} {topology!r:.100}. "
            "ts.tpu.initialize_tpu_system returns one."
        )
    return topology


def _checked_number(num_replicas: SupportsIndex) -> int:
    try:
        number = operator.index(num_replicas)
    except TypeError as error:
        raise WrongTypeError(
            f"num_replicas must be an integer; got {type(num_replicas).__name__} {num_replicas!r:.100}."
        ) from error
    if number < 0:
        raise InvalidArgumentError(f"num_replicas must not be negative; got {number}.")
    return number


def _checked_order(device_order_mode: int) -> DeviceOrderMode:
    try:
        return DeviceOrderMode(device_order_mode)
    except ValueError as error:
        raise InvalidArgumentError(
            f"device_order_mode must be one of {[str(mode.name) for mode in DeviceOrderMode]} of DeviceOrderMode; got "
            f"{device_order_mode!r:.100}."
        ) from error
