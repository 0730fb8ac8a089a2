"""How many replicas and hosts a `TPUStrategy` counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.harness import Case, Difference, opened
from torchstrat.sharding.tpu.system import system_of
from torchstrat.testing.fake_tpu import FakeSpmdRuntime
from torchstrat.tpu import DeviceAssignment, Topology


def runtime(setup: dict[str, Any]) -> FakeSpmdRuntime:
    """``{"hosts": 2, "cores_per_host": 8}``, in a row of chips of two cores; or ``{"topology": "2x2x1x2, 1 task"}``."""
    if "topology" in setup:
        mesh, tasks = re.fullmatch(r"([\dx]+), (\d+) tasks?", setup["topology"]).groups()  # type: ignore[union-attr]
        x, y, z, cores = map(int, mesh.split("x"))
        return FakeSpmdRuntime(x * y * z * cores, [x, y, z, cores], int(tasks))
    cores = setup["hosts"] * setup["cores_per_host"]
    per_chip = 2 if cores % 2 == 0 else 1
    return FakeSpmdRuntime(cores, [cores // per_chip, 1, 1, per_chip], setup["hosts"])


def assignment(topology: Topology, wanted: Any) -> DeviceAssignment | None:
    if not wanted:
        return None
    return DeviceAssignment.build(
        topology, computation_shape=wanted["computation_shape"], num_replicas=wanted["num_replicas"]
    )


def replica_counts(case: Case) -> dict[str, int]:
    devices = runtime(case.setup)
    wanted = case.inputs or case.setup.get("device_assignment")
    strategy = opened(
        ts.TPUStrategy(device_assignment=assignment(system_of(devices).topology, wanted), _runtime=devices)
    )
    return {
        "num_hosts": strategy.extended.num_hosts,
        "num_replicas_per_host": strategy.extended.num_replicas_per_host,
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
    }


OPS: dict[str, Callable[[Case], Any]] = {"replica_counts": replica_counts}
DIFFERS: dict[str, Difference] = {}
NO_COUNTERPART: dict[str, str] = {}
