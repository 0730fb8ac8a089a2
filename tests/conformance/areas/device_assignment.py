"""`ts.tpu.DeviceAssignment`: which cores make up which replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.areas.topology import recorded_topology
from tests.conformance.differences import returns
from tests.conformance.harness import Case, Difference
from torchstrat.sharding.tpu.device_assignment import DeviceAssignment, DeviceOrderMode

MISC: dict[str, dict[str, Any]] = {
    "rank-3 computation shape": {"computation_shape": [1, 1, 2], "num_replicas": 1},
    "too many replicas": {"computation_shape": [1, 1, 1, 2], "num_replicas": 17},
    "num_replicas -1": {"num_replicas": -1},
}


def described(assignment: DeviceAssignment) -> dict[str, Any]:
    def each(of_core: Callable[[int, int], Any]) -> list[list[Any]]:
        logical_cores = range(assignment.num_cores_per_replica)
        return [[of_core(replica, core) for core in logical_cores] for replica in range(assignment.num_replicas)]

    return {
        "num_replicas": assignment.num_replicas,
        "num_cores_per_replica": assignment.num_cores_per_replica,
        "core_assignment": assignment.core_assignment.tolist(),
        "tpu_device": each(lambda replica, core: assignment.tpu_device(replica, core, job="worker")),
        "host_device": each(lambda replica, core: assignment.host_device(replica, core, job="worker")),
        "tpu_ordinal": each(assignment.tpu_ordinal),
    }


def build(case: Case) -> dict[str, Any]:
    arguments = dict(case.inputs)
    if "device_order_mode" in arguments:
        arguments["device_order_mode"] = DeviceOrderMode[arguments["device_order_mode"]]
    return described(DeviceAssignment.build(recorded_topology(case.setup), **arguments))


def build_misc(case: Case) -> dict[str, Any]:
    return described(DeviceAssignment.build(recorded_topology(case.setup), **MISC[case.inputs["what"]]))


def constructor(case: Case) -> dict[str, Any]:
    return described(DeviceAssignment(recorded_topology(case.setup), case.inputs["core_assignment"]))


def pairs(case: Case) -> DeviceAssignment:
    """Replicas of one chip's two cores: what the look-ups were recorded on."""
    built = {"computation_shape": [1, 1, 1, 2], "num_replicas": 16}
    arguments = {name: case.setup.get(name, value) for name, value in built.items()}
    return DeviceAssignment.build(recorded_topology(case.setup), **arguments)


def lookup_replicas(case: Case) -> dict[str, Any]:
    assignment = pairs(case)
    tasks, cores = range(assignment.topology.num_tasks), range(assignment.num_cores_per_replica)
    return {f"task{task}_core{core}": assignment.lookup_replicas(task, core) for task in tasks for core in cores}


def lookup_replicas_error(case: Case) -> list[int]:
    return pairs(case).lookup_replicas(case.inputs["task"], case.inputs["logical_core"])


def tpu_device_out_of_range(case: Case) -> str:
    return pairs(case).tpu_device(case.inputs["replica"], case.inputs["logical_core"])


OPS: dict[str, Callable[[Case], Any]] = {
    "build": build,
    "build_misc": build_misc,
    "build_order_mode": build,
    "build_stride": build,
    "build_with_missing_devices": build,
    "constructor": constructor,
    "lookup_replicas": lookup_replicas,
    "lookup_replicas_error": lookup_replicas_error,
    "tpu_device_out_of_range": tpu_device_out_of_range,
}


def _first_cores(number: int) -> dict[str, Any]:
    """One replica of the first ``number`` cores of task 0, which stand on chip (0, 0, 0)."""
    return {
        "num_replicas": 1,
        "num_cores_per_replica": number,
        "core_assignment": [[[0, 0, 0, core] for core in range(number)]],
        "tpu_device": [[f"/job:worker/task:0/device:TPU:{core}" for core in range(number)]],
        "host_device": [["/job:worker/task:0/device:CPU:0"] * number],
        "tpu_ordinal": [list(range(number))],
    }


DIFFERS: dict[str, Difference] = {
    "device_assignment/build_misc/001": returns(
        10, "Three entries [x, y, core] mean [x, y, 1, core].", _first_cores(2), build_misc
    ),
    "device_assignment/build_stride/007": returns(
        10, "Three entries [x, y, core] mean [x, y, 1, core].", _first_cores(1), build
    ),
}
NO_COUNTERPART: dict[str, str] = {}
