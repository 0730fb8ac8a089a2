"""`ts.tpu.Topology`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.differences import raises
from tests.conformance.harness import Case, Difference
from torchstrat.distributed.tpu_topology import Topology
from torchstrat.errors import InvalidArgumentError


def recorded_topology(setup: dict[str, Any]) -> Topology:
    """The topology of a case: by its coordinates, or by a name such as ``"4x2x1x2, 2 tasks"``.

    Where the recorded topologies have several tasks, each drives up to 2 × 2 chips of one plane.
    """
    if "mesh_shape" in setup:
        return Topology(mesh_shape=setup["mesh_shape"], device_coordinates=setup["device_coordinates"])
    mesh, tasks = setup["topology"].split(", ")
    x, y, z, cores = map(int, mesh.split("x"))
    several = not tasks.startswith("1 ")
    return Topology.virtual([x, y, z, cores], [min(x, 2), min(y, 2), 1, cores] if several else None)


def attributes(case: Case) -> dict[str, Any]:
    topology = recorded_topology(case.setup)
    return {
        "mesh_rank": topology.mesh_rank,
        "num_tasks": topology.num_tasks,
        "num_tpus_per_task": topology.num_tpus_per_task,
        "missing_devices": topology.missing_devices.tolist(),
    }


def missing_devices(case: Case) -> dict[str, Any]:
    return {"missing_devices": recorded_topology(case.setup).missing_devices.tolist()}


def lookup_last_device(case: Case) -> dict[str, Any]:
    topology, place = recorded_topology(case.setup), case.inputs["coordinates"]
    return {
        "task_ordinal": topology.task_ordinal_at_coordinates(place),
        "tpu_device_ordinal": topology.tpu_device_ordinal_at_coordinates(place),
        "tpu_device_name": topology.tpu_device_name_at_coordinates(place),
        "tpu_device_name_job_worker": topology.tpu_device_name_at_coordinates(place, job="worker"),
        "cpu_device_name_job_worker": topology.cpu_device_name_at_coordinates(place, job="worker"),
        "cpu_device_name": topology.cpu_device_name_at_coordinates(place),
    }


def serialize_roundtrip(case: Case) -> dict[str, Any]:
    topology = recorded_topology(case.setup)
    restored = Topology(serialized=topology.serialized())
    same = (restored.device_coordinates == topology.device_coordinates).all()
    return {"mesh_shape": restored.mesh_shape.tolist(), "same_coordinates": bool(same)}


def error(case: Case) -> Any:
    calls: dict[str, Callable[[], Any]] = {
        "coordinates rank 2": lambda: Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[0, 0, 0, 0]]),
        "garbage bytes": lambda: Topology(serialized=b"garbage"),
        "nothing": lambda: Topology(),
        "lookup outside mesh": lambda: Topology.virtual([1, 1, 1, 2]).task_ordinal_at_coordinates([5, 0, 0, 0]),
    }
    return calls[case.inputs["what"]]()


OPS: dict[str, Callable[[Case], Any]] = {
    "attributes": attributes,
    "error": error,
    "lookup_last_device": lookup_last_device,
    "missing_devices": missing_devices,
    "serialize_roundtrip": serialize_roundtrip,
}
DIFFERS: dict[str, Difference] = {
    # TensorFlow lets the error of its Protocol Buffers library through.
    "topology/error/006": raises(4, InvalidArgumentError, "serialized is not a topology", error),
}
NO_COUNTERPART: dict[str, str] = {}
