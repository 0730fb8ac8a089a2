"""Which TPU cores there are, where each stands in the mesh, and which task drives it; public as `ts.tpu.Topology`.

A place in the mesh is four integers ``[x, y, z, core]``: chips on a grid and cores on a chip. Older documents have
three entries for shapes, ``[x, y, core]``; they mean ``[x, y, 1, core]``.

A topology as bytes has the wire format of Protocol Buffers, with TensorFlow's numbers for the fields.

::

    message TopologyProto {
      repeated int32 mesh_shape = 1;
      int32 num_tasks = 2;
      int32 num_tpu_devices_per_task = 3;
      repeated int32 device_coordinates = 4;   // tasks × devices per task × 4, flat
    }

So either side reads what the other wrote. Fields of other numbers (the hardware's features) are skipped. The format is
described at https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError

Integers = npt.NDArray[np.int64]
MeshShape = tuple[int, int, int, int]

MESH_RANK = 4
MAX_MESH_POINTS = 2**24
"""Of a mesh. Far above the largest TPU; a damaged description is refused before memory is taken for it."""


def integers(name: str, value: object) -> Integers:
    """``value``, nested sequences of integers or an array or tensor of them, as a new array.

    Raises:
        WrongTypeError: it holds anything else.
        InvalidArgumentError: its rows have different lengths.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(f"{name} must be rectangular; got {value!r:.200}.") from error
    if array.dtype.kind not in "iu" and not (array.size == 0 and array.dtype.kind == "f"):  # [] is an array of floats
        raise WrongTypeError(f"{name} must hold integers; got {type(value).__name__} {value!r:.200}.")
    return array.astype(np.int64)


def mesh_axes(name: str, value: object) -> MeshShape:
    """``value`` as sizes along x, y, z and core, of which each is at least 1.

    Raises:
        WrongTypeError: it does not hold integers.
        InvalidArgumentError: it has not three or four entries, or one below 1.
    """
    entries = integers(name, value)
    if entries.ndim != 1 or len(entries) not in (MESH_RANK - 1, MESH_RANK) or (entries < 1).any():
        raise InvalidArgumentError(
            f"{name} must be four positive integers [x, y, z, core], or three [x, y, core]; got {entries.tolist()}."
        )
    *chips, cores = entries.tolist()
    x, y, z = chips if len(chips) == MESH_RANK - 1 else (*chips, 1)
    return x, y, z, cores


def checked_mesh_shape(value: object) -> MeshShape:
    """`mesh_axes` of a mesh, whose number of points is bounded by `MAX_MESH_POINTS`."""
    shape = mesh_axes("mesh_shape", value)
    if math.prod(shape) > MAX_MESH_POINTS:
        raise InvalidArgumentError(
            f"mesh_shape {list(shape)} has {math.prod(shape)} points; at most {MAX_MESH_POINTS} can be described."
        )
    return shape


def frozen(array: Integers) -> Integers:
    """``array``, from now on read-only."""
    array.flags.writeable = False
    return array


MESH_SHAPE, NUM_TASKS, DEVICES_PER_TASK, COORDINATES = 1, 2, 3, 4
VARINT, FIXED_64_BITS, LENGTH_DELIMITED, FIXED_32_BITS = 0, 1, 2, 5
FIXED_SIZES = {FIXED_64_BITS: 8, FIXED_32_BITS: 4}
VARINT_BYTES = 10
"""The longest varint that the format allows: 64 bits, 7 in a byte."""


@dataclass(frozen=True)
class TopologyFields:
    """The fields as they stand in the bytes, unchecked; those that do not occur are empty or 0."""

    mesh_shape: list[int]
    num_tasks: int
    num_tpus_per_task: int
    device_coordinates: list[int]


def encode(fields: TopologyFields) -> bytes:
    """``fields`` as bytes. All numbers have to be non-negative."""
    return b"".join(
        (
            _packed(MESH_SHAPE, fields.mesh_shape),
            _varint(NUM_TASKS << 3 | VARINT) + _varint(fields.num_tasks),
            _varint(DEVICES_PER_TASK << 3 | VARINT) + _varint(fields.num_tpus_per_task),
            _packed(COORDINATES, fields.device_coordinates),
        )
    )


def decode(data: bytes) -> TopologyFields:
    """The fields that ``data`` holds.

    Raises:
        WrongTypeError: ``data`` is not bytes.
        InvalidArgumentError: ``data`` is not in the format, or ends too early.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise WrongTypeError(f"serialized must be the bytes of a topology; got {type(data).__name__} {data!r:.200}.")
    data = bytes(data)
    try:
        found: dict[int, list[int]] = {MESH_SHAPE: [], NUM_TASKS: [0], DEVICES_PER_TASK: [0], COORDINATES: []}
        for number, value in _values(data):
            if number in found:
                found[number].append(value)
    except _MalformedError as error:
        raise InvalidArgumentError(
            f"serialized is not a topology: {error}, in {len(data)} bytes that begin with {data[:16]!r}. Pass what "
            "Topology.serialized() returned."
        ) from None
    # Of a field that is no list, the last value counts.
    return TopologyFields(found[MESH_SHAPE], found[NUM_TASKS][-1], found[DEVICES_PER_TASK][-1], found[COORDINATES])


class _MalformedError(Exception):
    """The bytes are not in the format; the message says where and why."""


def _values(data: bytes) -> Iterator[tuple[int, int]]:
    """The integers in ``data`` with the numbers of their fields. Lists may come packed, or value by value."""
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, position = _read_varint(data, position)
            yield number, _signed(value)
            continue
        if kind == LENGTH_DELIMITED:
            size, position = _read_varint(data, position)
        elif kind in FIXED_SIZES:
            size = FIXED_SIZES[kind]
        else:
            raise _MalformedError(f"byte {position - 1} begins a field of unknown kind {kind}")
        content, position = data[position : position + size], position + size
        if position > len(data):
            raise _MalformedError(f"field {number} ends {position - len(data)} bytes after the end")
        if number in (MESH_SHAPE, COORDINATES) and kind == LENGTH_DELIMITED:
            yield from ((number, value) for value in _unpacked(content))


def _unpacked(content: bytes) -> Iterator[int]:
    position = 0
    while position < len(content):
        value, position = _read_varint(content, position)
        yield _signed(value)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at ``position`` and the position after it: 7 bits per byte, lowest first, the top bit says more."""
    value = 0
    for shift, byte in enumerate(data[position : position + VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position + shift + 1
    raise _MalformedError(f"the number at byte {position} does not end")


def _signed(value: int) -> int:
    """Negative numbers are stored in two's complement of 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _packed(number: int, values: Iterable[int]) -> bytes:
    content = b"".join(map(_varint, values))
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(content)) + content


@final
class Topology:
    """A mesh of TPU cores: chips on a grid x × y × z, and the cores of each chip.

    Every task (process) drives the same number of cores. A point of the mesh that no task drives is a missing device.
    Immutable; equal where mesh and coordinates are. No accelerator is touched.

    Args:
        serialized: The bytes that `serialized` returned, here or in TensorFlow; alone, in place of the other two.
        mesh_shape: Sizes ``[x, y, z, core]``; three entries ``[x, y, core]`` mean ``[x, y, 1, core]``.
        device_coordinates: ``(task, device of the task, 4)`` integers: where each core stands. With a ``mesh_shape`` of
            three entries the coordinates may have three, too, and then z is 0.

    Raises:
        WrongTypeError: neither is given, or one holds no integers.
        InvalidArgumentError: the shapes are not these; a coordinate is outside the mesh; two cores share a place;
            ``serialized`` is not a topology.
    """

    def __init__(self, serialized: bytes | None = None, mesh_shape: Any = None, device_coordinates: Any = None) -> None:
        if serialized is not None:
            if mesh_shape is not None or device_coordinates is not None:
                raise InvalidArgumentError(
                    "Topology takes serialized, or mesh_shape and device_coordinates, not both; leave one out."
                )
            mesh_shape, device_coordinates = _deserialized(serialized)
        if mesh_shape is None or device_coordinates is None:
            raise WrongTypeError(
                "Topology needs mesh_shape and device_coordinates, or serialized; got "
                f"mesh_shape={mesh_shape!r:.100} and device_coordinates={device_coordinates!r:.100}."
            )
        self._shape = checked_mesh_shape(mesh_shape)
        self._device_coordinates = frozen(_with_z(integers("device_coordinates", device_coordinates), len(mesh_shape)))
        self._places = frozen(self._invert())

    @classmethod
    def virtual(cls, mesh_shape: object, host_shape: object = None) -> Topology:
        """A topology without missing devices, for virtual devices and for planning without a TPU.

        Args:
            mesh_shape: Sizes ``[x, y, z, core]``, or ``[x, y, core]``.
            host_shape: The part of the mesh that one task drives, in the same form; None: the whole mesh. Tasks, and
                the devices of a task, are numbered core-axis first, then along x, y and z.

        Raises:
            InvalidArgumentError: ``host_shape`` does not divide the mesh along each axis.
        """
        mesh = checked_mesh_shape(mesh_shape)
        host = mesh if host_shape is None else mesh_axes("host_shape", host_shape)
        if any(size % part for size, part in zip(mesh, host, strict=True)):
            raise InvalidArgumentError(f"host_shape {list(host)} does not divide mesh_shape {list(mesh)} on each axis.")
        tasks = [size // part for size, part in zip(mesh, host, strict=True)]
        corners = _points_core_first(tasks) * np.array(host)
        return cls(mesh_shape=mesh, device_coordinates=corners[:, None] + _points_core_first(host))

    @property
    def mesh_shape(self) -> Integers:
        """Sizes of the mesh along x, y, z and core, ``(4,)``."""
        return frozen(np.array(self._shape))

    @property
    def mesh_rank(self) -> int:
        """The number of the mesh's axes: 4."""
        return MESH_RANK

    @property
    def device_coordinates(self) -> Integers:
        """Where each core stands: ``(task, device of the task, 4)``, read-only."""
        return self._device_coordinates

    @property
    def num_tasks(self) -> int:
        """The number of processes that drive cores."""
        return len(self._device_coordinates)

    @property
    def num_tpus_per_task(self) -> int:
        """The number of cores that each task drives."""
        return int(self._device_coordinates.shape[1])

    @property
    def missing_devices(self) -> Integers:
        """The points of the mesh that no task drives, ``(missing, 4)``, ascending."""
        return np.argwhere(self._places < 0)

    def device_indices_at(self, coordinates: object) -> Integers:
        """The numbers of the cores at ``coordinates``, counted in task order: task × cores per task + ordinal.

        Args:
            coordinates: ``(…, 4)``. Negative ones count from the end of their axis.

        Returns:
            ``(…)``.

        Raises:
            WrongTypeError: no integers.
            InvalidArgumentError: the last dimension is not 4; a point is outside the mesh, or has no device.
        """
        points = integers("device_coordinates", coordinates)
        if points.ndim == 0 or points.shape[-1] != MESH_RANK:
            raise InvalidArgumentError(
                f"a place in the mesh is four integers [x, y, z, core]; got {points.tolist()!r:.200}."
            )
        outside = points[((points < -self.mesh_shape) | (points >= self.mesh_shape)).any(axis=-1)]
        if len(outside):
            raise InvalidArgumentError(
                f"coordinates {_listed(outside)} are outside the mesh {list(self._shape)} (x, y, z, core)."
            )
        indices = self._places[tuple(np.moveaxis(points, -1, 0))]
        if (indices < 0).any():
            raise InvalidArgumentError(
                f"no device stands at {_listed(points[indices < 0])}; missing_devices lists the mesh's holes."
            )
        return np.asarray(indices)

    def task_ordinal_at_coordinates(self, device_coordinates: object) -> int:
        """The task that drives the core at ``[x, y, z, core]``. Raises as `device_indices_at`, as all below do."""
        return self._index_at(device_coordinates) // self.num_tpus_per_task

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: object) -> int:
        """The number of the core at ``[x, y, z, core]`` among those of its task."""
        return self._index_at(device_coordinates) % self.num_tpus_per_task

    def cpu_device_name_at_coordinates(self, device_coordinates: object, job: str | None = None) -> str:
        """The CPU of the host that drives the core there: ``/job:J/task:T/device:CPU:0``, the job only if given."""
        return f"{_job(job)}/task:{self.task_ordinal_at_coordinates(device_coordinates)}/device:CPU:0"

    def tpu_device_name_at_coordinates(self, device_coordinates: object, job: str | None = None) -> str:
        """The core there: ``/job:J/task:T/device:TPU:D``, the job only if given."""
        task, ordinal = divmod(self._index_at(device_coordinates), self.num_tpus_per_task)
        return f"{_job(job)}/task:{task}/device:TPU:{ordinal}"

    def serialized(self) -> bytes:
        """This topology as bytes, which TensorFlow reads as well; ``Topology(serialized=…)`` is equal to it."""
        coordinates = self._device_coordinates.reshape(-1).tolist()
        return encode(TopologyFields(list(self._shape), self.num_tasks, self.num_tpus_per_task, coordinates))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        own = np.array_equal(self._device_coordinates, other.device_coordinates)
        return own and np.array_equal(self.mesh_shape, other.mesh_shape)

    def __hash__(self) -> int:
        return hash((self._shape, self._device_coordinates.shape, self._device_coordinates.tobytes()))

    def __repr__(self) -> str:
        return (
            f"Topology(mesh_shape={list(self._shape)}, num_tasks={self.num_tasks}, "
            f"num_tpus_per_task={self.num_tpus_per_task}, missing_devices={len(self.missing_devices)})"
        )

    def _index_at(self, device_coordinates: Any) -> int:
        indices = self.device_indices_at(device_coordinates)
        if indices.ndim:
            raise InvalidArgumentError(
                f"one place [x, y, z, core] was needed; got an array of shape {list(np.shape(device_coordinates))}."
            )
        return int(indices)

    def _invert(self) -> Integers:
        """Of the mesh's shape: the number of the core at each point in task order, -1 where there is none."""
        coordinates = self._device_coordinates
        if coordinates.ndim != 3 or coordinates.shape[-1] != MESH_RANK or coordinates.size == 0:
            raise InvalidArgumentError(
                "device_coordinates must have the shape (tasks, devices per task, 4), with at least one device; got "
                f"{list(coordinates.shape)}."
            )
        points = coordinates.reshape(-1, MESH_RANK)
        outside = points[((points < 0) | (points >= self.mesh_shape)).any(axis=1)]
        if len(outside):
            raise InvalidArgumentError(
                f"device_coordinates {_listed(outside)} are outside the mesh {list(self._shape)} (x, y, z, core)."
            )
        distinct, counts = np.unique(points, axis=0, return_counts=True)
        if len(distinct) < len(points):
            raise InvalidArgumentError(
                f"device_coordinates name {_listed(distinct[counts > 1])} more than once; each core has its own place."
            )
        places = np.full(self._shape, -1, dtype=np.int64)
        places[tuple(points.T)] = np.arange(len(points))
        return places


def _deserialized(serialized: bytes) -> tuple[list[int], Integers]:
    fields = decode(serialized)
    tasks, devices = fields.num_tasks, fields.num_tpus_per_task
    axes = len(fields.mesh_shape)
    if (
        axes not in (MESH_RANK - 1, MESH_RANK)
        or min(tasks, devices) < 1
        or len(fields.device_coordinates) != tasks * devices * axes
    ):
        raise InvalidArgumentError(
            f"serialized is not a topology: it has mesh_shape {fields.mesh_shape!r:.100}, {tasks} tasks, {devices} "
            f"devices per task and {len(fields.device_coordinates)} coordinates; a mesh_shape of four entries (or "
            "three, x, y, core), at least one task and device, and as many coordinates for each device are needed."
        )
    return fields.mesh_shape, np.array(fields.device_coordinates).reshape(tasks, devices, axes)


def _with_z(coordinates: Integers, mesh_entries: int) -> Integers:
    """Coordinates ``[x, y, core]`` of a mesh that was given as ``[x, y, core]`` get z = 0."""
    if mesh_entries == MESH_RANK - 1 and coordinates.ndim == 3 and coordinates.shape[-1] == MESH_RANK - 1:
        return np.insert(coordinates, 2, 0, axis=-1)
    return coordinates


def _points_core_first(shape: Any) -> Integers:
    """All points of a grid ``[x, y, z, core]``, ``(points, 4)``: the core runs fastest, then x, y, z."""
    x, y, z, cores = map(range, shape)
    return np.array([(a, b, c, core) for c, b, a, core in itertools.product(z, y, x, cores)])


def _job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"


def _listed(points: Integers, most: int = 4) -> str:
    """The first points, for a message."""
    shown = ", ".join(str(point) for point in points[:most].tolist())
    return shown if len(points) <= most else f"{shown} and {len(points) - most} more"
