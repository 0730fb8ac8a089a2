"""The topology of the devices that a TPU runtime describes, and the runtime's own numbers of them. Pure data.

Runtimes describe each device by a mapping such as ``{"name": "TPU:3", "coords": [1, 0, 0], "core_on_chip": 1}``, with
a ``slice_index`` where several slices work together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.sharding.tpu.coordinates import Integers, frozen
from torchstrat.sharding.tpu.device_assignment import DeviceAssignment
from torchstrat.sharding.tpu.topology import Topology

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
        cls, attributes: Sequence[Mapping[str, Any]], process_indices: Sequence[int], *, allow_missing: bool = False
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

    def __init__(self, attributes: Sequence[Mapping[str, Any]], process_indices: Sequence[int]) -> None:
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

    def _read(self, position: int, device: Mapping[str, Any], sliced: bool) -> None:
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


def _is_index(value: Any) -> TypeGuard[int]:
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
