"""Which TPU cores make up which replica; public as `ts.tpu.DeviceAssignment`."""

from __future__ import annotations

import operator
from typing import Any, final

import numpy as np

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.sharding.tpu.coordinates import MESH_RANK, Integers, frozen, integers, mesh_axes
from torchstrat.sharding.tpu.device_order import DeviceOrderMode, Tiling
from torchstrat.sharding.tpu.topology import Topology

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

    def __init__(self, topology: Topology, core_assignment: Any) -> None:
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
        computation_shape: Any = None,
        computation_stride: Any = None,
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
        return self._topology == other._topology and np.array_equal(self._core_assignment, other._core_assignment)

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


def _checked_topology(topology: Any) -> Topology:
    if not isinstance(topology, Topology):
        raise InvalidArgumentError(
            f"topology must be a ts.tpu.Topology; got {type(topology).__name__} {topology!r:.100}. "
            "ts.tpu.initialize_tpu_system returns one."
        )
    return topology


def _checked_number(num_replicas: Any) -> int:
    try:
        number = operator.index(num_replicas)
    except TypeError as error:
        raise WrongTypeError(
            f"num_replicas must be an integer; got {type(num_replicas).__name__} {num_replicas!r:.100}."
        ) from error
    if number < 0:
        raise InvalidArgumentError(f"num_replicas must not be negative; got {number}.")
    return number


def _checked_order(device_order_mode: Any) -> DeviceOrderMode:
    try:
        return DeviceOrderMode(device_order_mode)
    except ValueError as error:
        raise InvalidArgumentError(
            f"device_order_mode must be one of {[str(mode.name) for mode in DeviceOrderMode]} of DeviceOrderMode; got "
            f"{device_order_mode!r:.100}."
        ) from error
