"""The TPU system of this process: its devices, real or virtual, found once.

A runtime numbers its devices, and describes each by a mapping such as ``{"name": "TPU:3", "coords": [1, 0, 0],
"core_on_chip": 1}``, with a ``slice_index`` where several slices work together.
"""

from __future__ import annotations

import glob
import math
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from torchstrat.core.errors import ContextError, DeviceError, InvalidArgumentError, WrongTypeError
from torchstrat.distributed.cluster import ClusterResolver, ClusterSpec
from torchstrat.distributed.cluster_resolver import TPUClusterResolver
from torchstrat.distributed.tpu_topology import Integers, Topology, checked_mesh_shape, frozen
from torchstrat.sharding.tpu.device_assignment import DeviceAssignment
from torchstrat.sharding.tpu.spmd import SpmdRuntime

MOST_PROBLEMS = 8
"""That one message lists."""


@dataclass(frozen=True, eq=False)
class RuntimeDevices:
    """The devices of a runtime as a mesh.

    Attributes:
        topology: The mesh. The devices of a task are in the order of their numbers.
        numbers: ``(devices,)``: the runtime's number of each device, in task order. They differ from 0, 1, 2, … where
            the runtime numbers devices along the mesh rather than host by host.
    """

    topology: Topology
    numbers: Integers

    @classmethod
    def from_attributes(
        cls, attributes: Sequence[Mapping[str, object]], process_indices: Sequence[int], *, allow_missing: bool = False
    ) -> RuntimeDevices:
        """Sort and check what the runtime says.

        Coordinates are moved so that the mesh begins at the origin. Slices are put one behind the other along z, where
        replicas reach last.

        Args:
            attributes: One mapping per device of the whole job, in any order: ``name`` ends in the device's number,
                ``coords`` are the chip's three coordinates, ``core_on_chip`` is the number of the core, ``slice_index``
                that of the slice.
            process_indices: The process that drives the device, for each of ``attributes``; becomes its task.
            allow_missing: Whether the mesh may have holes, as where only some chips are made visible.

        Raises:
            InvalidArgumentError: something is missing, malformed, repeated or left out; the message lists what.
        """
        found = _Devices(attributes, process_indices)
        found.check_numbers()
        found.check_tasks()
        found.raise_problems()
        order = np.lexsort((found.numbers, found.tasks))
        places = _in_one_mesh(np.array(found.slices), np.array(found.places))[order]
        found.check_places(places, allow_missing)
        found.raise_problems()
        topology = Topology(
            mesh_shape=places.max(axis=0) + 1,
            device_coordinates=places.reshape(max(found.tasks) + 1, -1, places.shape[-1]),
        )
        return cls(topology, frozen(np.array(found.numbers)[order]))

    def numbers_of(self, assignment: DeviceAssignment) -> Integers:
        """The runtime's number of each logical core's device, ``(replica, logical core)``; none occurs twice.

        Raises:
            InvalidArgumentError: ``assignment`` is of another topology, or uses a device more than once.
        """
        if assignment.topology != self.topology:
            raise InvalidArgumentError(
                f"the device assignment is of {assignment.topology!r}, and the runtime has {self.topology!r}. "
                "Build it from the topology that initialize_tpu_system returned."
            )
        return np.asarray(self.numbers[assignment.device_indices()])


class _Devices:
    """What could be read, device by device, and all that was wrong."""

    def __init__(self, attributes: Sequence[Mapping[str, object]], process_indices: Sequence[int]) -> None:
        self.problems: list[str] = []
        self.numbers: list[int] = []
        self.slices: list[int] = []
        self.places: list[tuple[int, ...]] = []
        self.tasks = list(process_indices)
        if not attributes:
            self.problems.append("there is no device")
        if len(attributes) != len(process_indices):
            self.problems.append(f"{len(attributes)} devices have {len(process_indices)} process indices")
        sliced = any("slice_index" in device for device in attributes)
        for position, device in enumerate(attributes):
            self._read(position, device, sliced)

    def _read(self, position: int, device: Mapping[str, object], sliced: bool) -> None:
        name, coords, core = (device.get(key) for key in ("name", "coords", "core_on_chip"))
        number = re.search(r"\d+$", name) if isinstance(name, str) else None
        slice_index = device.get("slice_index") if sliced else 0
        chip = tuple(coords) if isinstance(coords, Sequence) and not isinstance(coords, str) else ()
        if number is None:
            self.problems.append(f"device {position} has the name {name!r}, which does not end in its number")
        elif len(chip) != 3 or not all(map(_is_index, chip)):
            self.problems.append(f"{name} has coords {coords!r}, not three numbers x, y, z")
        elif not _is_index(core):
            self.problems.append(f"{name} has core_on_chip {core!r}, not the number of a core")
        elif not _is_index(slice_index):
            self.problems.append(f"{name} has slice_index {slice_index!r}, which other devices have")
        else:
            self.numbers.append(int(number[0]))
            self.slices.append(slice_index)
            self.places.append((*chip, core))

    def check_numbers(self) -> None:
        """Numbers are 0, 1, 2, … without repetition; no two devices of a slice are at one place."""
        if self.problems:  # each is about a device that could not be read: all checks below would repeat it
            return
        if repeated := [number for number, times in Counter(self.numbers).items() if times > 1]:
            self.problems.append(f"the device numbers {sorted(repeated)} occur more than once")
        elif missing := sorted(set(range(len(self.numbers))) - set(self.numbers)):
            self.problems.append(f"{len(self.numbers)} devices lack the numbers {missing}")
        of_slice = zip(self.slices, self.places, strict=True)
        for (slice_index, place), times in Counter(of_slice).items():
            if times > 1:
                self.problems.append(f"{times} devices of slice {slice_index} are at {list(place)} (x, y, z, core)")

    def check_tasks(self) -> None:
        """Processes are 0, 1, 2, …, each with as many devices."""
        counts = Counter(self.tasks)
        if sorted(counts) != list(range(len(counts))):
            self.problems.append(f"the process indices are {sorted(counts, key=repr)}, not 0, 1, 2, …")
        if len(set(counts.values())) > 1:
            self.problems.append(f"processes have different numbers of devices: {dict(counts)}")

    def check_places(self, places: Integers, allow_missing: bool) -> None:
        """Every point of the mesh has a device."""
        holes = int(np.prod(places.max(axis=0) + 1)) - len(places)
        if holes and not allow_missing:
            self.problems.append(
                f"{len(places)} devices leave {holes} points of the mesh {(places.max(axis=0) + 1).tolist()} empty"
            )

    def raise_problems(self) -> None:
        if self.problems:
            more = len(self.problems) - MOST_PROBLEMS
            listed = "; ".join(self.problems[:MOST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
            raise InvalidArgumentError(
                f"the runtime's devices make no mesh: {listed}. Every process has to see the same complete list."
            )


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _in_one_mesh(slices: Integers, places: Integers) -> Integers:
    """The places ``(devices, 4)`` with every slice at the origin of x, y and core, one behind the other along z."""
    moved = np.empty_like(places)
    depth = 0
    for slice_index in np.unique(slices):
        own = slices == slice_index
        moved[own] = places[own] - places[own].min(axis=0) + [0, 0, depth, 0]
        depth = int(moved[own, 2].max()) + 1
    return moved


PLATFORM, VIRTUAL_DEVICES = "PJRT_DEVICE", "CPU_NUM_DEVICES"
"""What torch_xla reads, once: the kind of device, and how many the CPU is to pretend to be."""

_TPU_DEVICE_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


@dataclass(frozen=True)
class TpuSystem:
    """``devices``: what the runtime's numbers of devices mean in ``topology``."""

    runtime: SpmdRuntime
    devices: RuntimeDevices

    @property
    def topology(self) -> Topology:
        return self.devices.topology


_lock = threading.Lock()
_system: TpuSystem | None = None


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None, *, virtual_devices: int | None = None, mesh_shape: object = None
) -> Topology:
    """Start the TPU runtime of this process and say which devices there are.

    Call it before the first backward pass of the process; making a `TPUStrategy` calls it too. Later calls return the
    same topology.

    Args:
        cluster_resolver: a `TPUClusterResolver`, or None for the TPU of this machine.
        virtual_devices: instead of a TPU, let the CPU pretend to be that many devices. For tests and development: all
            of it works as on a TPU, slowly. The environment variables ``PJRT_DEVICE=CPU`` and ``CPU_NUM_DEVICES`` do
            the same.
        mesh_shape: of virtual devices, ``[x, y, z, core]`` or ``[x, y, core]``; by default two cores on each chip, the
            chips in a rectangle.

    Raises:
        DeviceError: there is no TPU.
        UnsupportedError: torch_xla is missing or of another release than torch; autograd has been used before.
        InvalidArgumentError: ``mesh_shape`` does not fit the number of devices.
        ContextError: the system runs already, with another number of devices or another shape.
    """
    if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
        raise WrongTypeError(
            "initialize_tpu_system needs a TPUClusterResolver or None; got "
            f"{type(cluster_resolver).__name__} {cluster_resolver!r:.80}."
        )
    with _lock:
        if _system is None:
            system = _start(virtual_devices, mesh_shape)
        else:
            system = _system
            _require_same(system, virtual_devices, mesh_shape)
    if isinstance(cluster_resolver, TPUClusterResolver):
        cluster_resolver.set_tpu_topology(system.topology.serialized())
    return system.topology


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterResolver | ClusterSpec,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: object = None,
) -> None:
    """TensorFlow's way to make a TPU's devices known to the program. Does nothing here, and may be left out: the
    runtime finds the devices of its host by itself.

    Raises:
        WrongTypeError: the first argument is neither a cluster resolver nor a `ClusterSpec`.
    """
    if not isinstance(cluster_spec_or_resolver, ClusterResolver | ClusterSpec):
        raise WrongTypeError(
            "experimental_connect_to_cluster needs a cluster resolver or a ClusterSpec; got "
            f"{type(cluster_spec_or_resolver).__name__} {cluster_spec_or_resolver!r:.80}."
        )


def the_system() -> TpuSystem:
    """The system of this process, started if need be."""
    with _lock:
        return _system if _system is not None else _start(None, None)


def _start(virtual_devices: int | None, mesh_shape: object) -> TpuSystem:
    global _system
    shape = None if mesh_shape is None else checked_mesh_shape(mesh_shape)
    if virtual_devices is not None:
        _ask_for_virtual_devices(virtual_devices, shape)
    _require_devices()
    from torchstrat.sharding.tpu.runtime import xla_runtime

    _system = system_of(xla_runtime(), shape)
    return _system


def system_of(runtime: SpmdRuntime, mesh_shape: tuple[int, ...] | None = None) -> TpuSystem:
    """The system that ``runtime`` describes; where its devices have no places, ``mesh_shape`` gives them some."""
    attributes = runtime.device_attributes()
    if all("coords" in one for one in attributes):
        if mesh_shape is not None:
            raise InvalidArgumentError(
                f"mesh_shape={list(mesh_shape)} is for virtual devices; those of {runtime.name} have places of their "
                "own."
            )
        processes = [process if isinstance(process := one.get("process_index"), int) else 0 for one in attributes]
        return TpuSystem(runtime, RuntimeDevices.from_attributes(attributes, processes))
    shape = mesh_shape or default_mesh_shape(runtime.num_devices)
    if math.prod(shape) != runtime.num_devices:
        raise InvalidArgumentError(
            f"mesh_shape={list(shape)} has {math.prod(shape)} places for {runtime.num_devices} devices "
            f"({runtime.name}); the product of its entries has to be that number."
        )
    numbers = frozen(np.arange(runtime.num_devices, dtype=np.int64))
    return TpuSystem(runtime, RuntimeDevices(Topology.virtual(shape), numbers))


def default_mesh_shape(devices: int) -> tuple[int, int, int, int]:
    """Two cores on each chip where that divides, and chips in the rectangle nearest to a square."""
    cores = 2 if devices % 2 == 0 else 1
    chips = devices // cores
    x = max(size for size in range(1, math.isqrt(chips) + 1) if chips % size == 0)
    return chips // x, x, 1, cores


def _ask_for_virtual_devices(count: int, shape: tuple[int, ...] | None) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgumentError(f"virtual_devices={count!r} must be an int of at least 1.")
    if shape is not None and math.prod(shape) != count:
        raise InvalidArgumentError(
            f"mesh_shape={list(shape)} has {math.prod(shape)} places for virtual_devices={count}; these must agree."
        )
    needed = {PLATFORM: "CPU", VIRTUAL_DEVICES: str(count)}
    for name, wanted in needed.items():
        given = os.environ.get(name)
        if given not in (None, wanted):
            raise InvalidArgumentError(
                f"virtual_devices={count} needs {name}={wanted}, and the environment says {name}={given}; unset it, or "
                "leave virtual_devices out."
            )
    os.environ.update(needed)


def _require_devices() -> None:
    """torch_xla without a TPU would quietly take the CPU as one device."""
    if os.environ.get(PLATFORM):
        return
    if not any(glob.glob(pattern) for pattern in _TPU_DEVICE_FILES):
        raise DeviceError(
            f"no TPU was found on this machine (no {' or '.join(_TPU_DEVICE_FILES)}), and {PLATFORM} is not set. "
            "Without one use virtual devices: ts.tpu.initialize_tpu_system(virtual_devices=8) at the start of the "
            f"program, or {PLATFORM}=CPU {VIRTUAL_DEVICES}=8 in the environment."
        )
    if sys.platform != "linux":
        raise DeviceError(f"TPUs are driven from Linux only; this is {sys.platform}.")


def _require_same(system: TpuSystem, virtual_devices: int | None, mesh_shape: object) -> None:
    topology = system.topology
    wanted = None if mesh_shape is None else checked_mesh_shape(mesh_shape)
    devices = system.runtime.num_devices
    if virtual_devices not in (None, devices) or (wanted is not None and wanted != tuple(topology.mesh_shape.tolist())):
        raise ContextError(
            f"the TPU system of this process runs with {devices} devices in a mesh of {topology.mesh_shape.tolist()}; "
            f"it cannot be initialized again with virtual_devices={virtual_devices}, mesh_shape={mesh_shape}. Once in "
            "a process is all there is: start another process."
        )
