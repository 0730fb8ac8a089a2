"""`CentralStorageStrategy`: its constructor, and where its variables live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.differences import raises, recorded_devices
from tests.conformance.harness import Case, Difference, opened
from torchstrat.errors import DeviceError


def constructor(case: Case) -> dict[str, Any]:
    strategy = opened(
        ts.CentralStorageStrategy(
            compute_devices=case.inputs["compute_devices"], parameter_device=case.inputs["parameter_device"]
        )
    )
    return {
        "num_replicas_in_sync": strategy.num_replicas_in_sync,
        "worker_devices": [*strategy.extended.worker_devices],
        "parameter_devices": [*strategy.extended.parameter_devices],
        "cluster_resolver_is_none": strategy.cluster_resolver is None,
    }


def device_scope_does_not_win(case: Case) -> list[str]:
    strategy = opened(ts.CentralStorageStrategy(["cpu:0", "cpu:1"], case.setup["parameter_device"]))
    elsewhere = torch.device(case.inputs["device scope"].lower())
    with strategy.scope(), elsewhere:
        inner = ts.Variable(1.0)
    with elsewhere, strategy.scope():
        outer = ts.Variable(1.0)
    return [strategy.extended.device_of(inner), strategy.extended.device_of(outer)]


def variable_created_in_replica_function(case: Case) -> dict[str, Any]:
    strategy = opened(ts.CentralStorageStrategy(["cpu:0", "cpu:1"], case.setup["parameter_device"]))
    made: list[ts.Variable] = []

    def step() -> torch.Tensor:
        variable = ts.Variable(1.0, aggregation=ts.VariableAggregation.SUM)
        made.append(variable)
        variable.assign_add(torch.tensor(1.0))
        return variable.read_value() + 0

    result = strategy.run(step)
    return {
        "same_object_on_both": made[0] is made[1],
        "devices": [strategy.extended.device_of(variable) for variable in made],
        "result": result,
    }


def created_in_scope_of_plain(_: Case) -> bool:
    return opened(ts.CentralStorageStrategy(["cpu:0"])).extended.variable_created_in_scope(ts.Variable(1.0))


OPS: dict[str, Callable[[Case], Any]] = {
    "constructor": constructor,
    "device_scope_does_not_win": device_scope_does_not_win,
    "variable_created_in_replica_fn": variable_created_in_replica_function,
    "variable_created_in_scope_of_plain_variable": created_in_scope_of_plain,
}


DIFFERS: dict[str, Difference] = {
    "central_storage/constructor/002": recorded_devices(constructor),
    "central_storage/constructor/006": raises(16, DeviceError, "is empty", constructor),
    "central_storage/constructor/007": recorded_devices(constructor),
    "central_storage/constructor/008": raises(16, DeviceError, "more than once", constructor),
    "central_storage/constructor/009": raises(16, DeviceError, "not on this machine", constructor),
    "central_storage/constructor/012": recorded_devices(constructor),
    "central_storage/device_scope_does_not_win/001": recorded_devices(device_scope_does_not_win),
    "central_storage/variable_created_in_replica_fn/001": recorded_devices(variable_created_in_replica_function),
}
NO_COUNTERPART: dict[str, str] = {}
FIELDS_WITHOUT_COUNTERPART = {"in_multi_worker_mode": "is private to TensorFlow's Keras; see num_replicas_in_sync"}
