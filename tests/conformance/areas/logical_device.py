"""The three annotations that cut a replica's tensors over its logical devices: what they check, and what they keep."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

import torchstrat as ts
from tests.conformance.differences import returns
from tests.conformance.harness import Case, Difference, opened, outcome
from torchstrat.data.spec import TensorSpec
from torchstrat.sharding.grid import DeviceGrid, Sharding
from torchstrat.testing.fake_tpu import fake_tpu_strategy

CANNOT_RESTRICT = "assign_to_logical_device"


def strategy(case: Case) -> ts.TPUStrategy:
    return opened(fake_tpu_strategy(case.setup.get("replicas", 1), case.setup["logical_devices"]))


def tensor(shape: list[int | None]) -> Any:
    """Of zeros; where sizes are not known, a spec: no tensor of PyTorch is like that."""
    return TensorSpec(tuple(shape), torch.float32) if None in shape else torch.zeros(shape)


def kept(case: Case, call: Callable[[ts.TPUStrategy, Any], Any]) -> dict[str, Any]:
    """What ``call`` keeps of the tensor that it is given."""
    before = tensor(case.inputs.get("tensor_shape", [4, 4]))
    after = call(strategy(case), before)
    return {"ok": {"same_shape": after.shape == before.shape, "dtype": str(after.dtype).removeprefix("torch.")}}


def split(case: Case) -> dict[str, Any]:
    dims = case.inputs["partition_dimensions"]
    return kept(case, lambda tpu, value: tpu.experimental_split_to_logical_devices(value, dims))


def replicate(case: Case) -> dict[str, Any]:
    return kept(case, lambda tpu, value: tpu.experimental_replicate_to_logical_devices(value))


def assign(case: Case) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=CANNOT_RESTRICT)
        return kept(
            case,
            lambda tpu, value: tpu.experimental_assign_to_logical_device(value, case.inputs["logical_device_id"]),
        )


def eager_values(case: Case) -> dict[str, Any]:
    """Outside of `run`: assign 1; split [2]; replicate."""
    tpu, value = strategy(case), torch.tensor(case.inputs["tensor"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=CANNOT_RESTRICT)
        return {
            "assign": outcome(lambda: tpu.experimental_assign_to_logical_device(value, 1)),
            "split": outcome(lambda: tpu.experimental_split_to_logical_devices(value, [2])),
            "replicate": outcome(lambda: tpu.experimental_replicate_to_logical_devices(value)),
        }


def methods_present(case: Case) -> dict[str, bool]:
    return {name: hasattr(ts.TPUStrategy, name) for name in case.expect}


def tile_order(case: Case) -> dict[str, Any]:
    """Which logical device has which part."""
    parts = case.inputs["partition_dimensions"]
    grid = DeviceGrid((tuple(range(case.setup["logical_devices"])),))
    order = torch.full(parts, -1)
    for device, tile in Sharding.split(parts).tiles(parts, grid).items():
        order[tile] = device
    assert order.numel() == math.prod(parts)
    return {"tile_assignment": order.tolist()}


OPS: dict[str, Callable[[Case], Any]] = {
    "assign_in_spmd_mode": assign,
    "eager_values": eager_values,
    "experimental_assign_to_logical_device": assign,
    "experimental_replicate_to_logical_devices": replicate,
    "experimental_split_to_logical_devices": split,
    "methods_present": methods_present,
    "tile_order": tile_order,
}

_KEPT = {"ok": {"same_shape": True, "dtype": "float32"}}
_VALUES = {"dtype": "float32", "shape": [2], "data": [1.0, 2.0]}
_PRESENT = {
    "experimental_assign_to_logical_device": True,
    "experimental_split_to_logical_devices": True,
    "experimental_replicate_to_logical_devices": True,
    "gather": True,
    "experimental_distribute_values_from_function": True,
    "experimental_make_numpy_dataset": True,
    "reduce": True,
}


def assign_with_a_warning(case: Case) -> None:
    """The id is checked, the tensor kept, and a warning says that this cannot restrict execution to one device."""
    tpu, value = strategy(case), torch.arange(4.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(tpu.assign_to_logical_device(value, case.inputs["logical_device_id"]), value)
    assert [CANNOT_RESTRICT in str(warning.message) for warning in caught] == [True], caught


DIFFERS: dict[str, Difference] = {
    "logical_device/assign_in_spmd_mode/001": Difference(17, assign_with_a_warning),
    "logical_device/eager_values/001": returns(
        9,
        "The annotations work eagerly, and keep the values.",
        {"assign": _VALUES, "split": _VALUES, "replicate": _VALUES},
        eager_values,
    ),
    "logical_device/methods_present/003": returns(
        9, "The annotations exist on every strategy; there is no older class without them.", _PRESENT, methods_present
    ),
}
NO_COUNTERPART: dict[str, str] = {
    "logical_device/experimental_split_to_logical_devices/065": "a tensor's sizes are always known in PyTorch",
}
FIELDS_WITHOUT_COUNTERPART = {"steps_per_run": "is how many steps TensorFlow's older Estimator ran on a TPU per call"}
