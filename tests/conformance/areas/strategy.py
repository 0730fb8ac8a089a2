"""What every strategy's constructor makes of its devices, and that strategies are not copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torchstrat as ts
from tests.conformance.differences import raises, recorded_devices
from tests.conformance.harness import Case, Difference, opened
from torchstrat.errors import DeviceError

CONSTRUCTORS: dict[str, Callable[[], ts.Strategy]] = {
    "mirrored empty list": lambda: ts.MirroredStrategy([]),
    "one device": lambda: ts.OneDeviceStrategy("/device:CPU:1"),
}
"""By the name that a case gives to what was built."""


def constructor(case: Case) -> dict[str, Any]:
    strategy = opened(CONSTRUCTORS[case.inputs["name"]]())
    return {
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
        "worker_devices": [*strategy.extended.worker_devices],
        "parameter_devices": [*strategy.extended.parameter_devices],
    }


def copies(case: Case) -> Any:
    replicas = [f"cpu:{index}" for index in range(case.setup["replicas"])]
    strategy = opened(ts.CentralStorageStrategy(replicas))
    return {"copy.copy": copy.copy, "copy.deepcopy": copy.deepcopy}[case.inputs["op"]](strategy)


OPS: dict[str, Callable[[Case], Any]] = {"constructor": constructor, "copy": copies}

DIFFERS: dict[str, Difference] = {
    "strategy/constructor/002": raises(16, DeviceError, "is empty", constructor),
    "strategy/constructor/006": recorded_devices(constructor),
}
NO_COUNTERPART: dict[str, str] = {}
