"""Device names: every accepted spelling, and every device that must be refused, without any accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchstrat.core import devices
from torchstrat.core.devices import canonical, require_present, resolve_compute_devices, resolve_parameter_device
from torchstrat.errors import DeviceError, WrongTypeError


@pytest.fixture(params=[2])
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    count: int = request.param
    monkeypatch.setattr(devices, "_count", lambda kind: count if kind == "cuda" else 0)
    return count


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("cpu", "cpu:0"),
        ("cpu:1", "cpu:1"),
        ("CPU:1", "cpu:1"),
        ("device:CPU:1", "cpu:1"),
        ("/device:CPU:1", "cpu:1"),
        ("/CPU:1", "cpu:1"),
        ("/job:localhost/replica:0/task:0/device:CPU:3", "cpu:3"),
        ("/replica:0/task:0/device:GPU:1", "cuda:1"),
        ("GPU:0", "cuda:0"),
        ("gpu", "cuda:0"),
        ("cuda", "cuda:0"),
        ("cuda:11", "cuda:11"),
        (torch.device("cpu"), "cpu:0"),
        (torch.device("cuda", 2), "cuda:2"),
        ("/job:worker/task:1/device:TPU:0", "/job:worker/task:1/device:TPU:0"),
    ],
)
def test_every_spelling_has_one_canonical_name(given: Any, name: str) -> None:
    assert canonical(given) == name
    assert canonical(name) == name


NO_NAMES = ["", " ", "c", "cpu:", "cpu:-1", "cpu:x", "cpu:1:2", "warp:0", "/device:CPU:*", "cpu 0"]
OTHER_TASKS = ["/job:worker/replica:0/task:0/device:CPU:0", "/job:localhost/replica:0/task:3/device:CPU:0"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        *((given, DeviceError, rf"'{given.replace('*', '.')}'(.|\n)*cpu:1") for given in NO_NAMES),
        *((given, DeviceError, "another task") for given in OTHER_TASKS),
        *((given, WrongTypeError, type(given).__name__) for given in (0, None, 1.5, ["cpu"])),
    ],
)
def test_what_is_no_device_is_named_in_the_error(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        canonical(given)


def test_virtual_cpus_share_the_one_cpu() -> None:
    assert devices.torch_device("cpu:7") == torch.device("cpu")
    assert devices.torch_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match="TPUStrategy"):
        devices.torch_device("/job:worker/task:0/device:TPU:0")


@pytest.mark.usefixtures("gpus")
def test_a_present_device_is_accepted_and_an_absent_one_is_not() -> None:
    assert require_present("GPU:1") == "cuda:1"
    with pytest.raises(DeviceError, match=r"'cuda:2' is not on this machine, which has cuda:0, cuda:1, cpu"):
        require_present("cuda:2")


def test_a_kind_without_a_runtime_is_absent() -> None:
    with pytest.raises(DeviceError, match="not on this machine"):
        require_present("meta")


@pytest.mark.parametrize(
    ("gpus", "given", "chosen"),
    [
        (2, None, ("cuda:0", "cuda:1")),
        (0, None, ("cpu:0",)),
        (0, ["/device:CPU:1", torch.device("cpu"), "cpu:5"], ("cpu:1", "cpu:0", "cpu:5")),
    ],
    indirect=["gpus"],
)
def test_what_is_computed_on(gpus: int, given: Any, chosen: tuple[str, ...]) -> None:
    assert resolve_compute_devices(given) == chosen


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("cpu:0", DeviceError, r"compute_devices=\['cpu:0'\]"),
        (["cpu", "CPU:0"], DeviceError, "cpu:0 more than once"),
        (["cpu:0", "nonsense"], DeviceError, "'nonsense'"),
        (["cuda:99"], DeviceError, "'cuda:99' is not on this machine"),
        *((given, WrongTypeError, "device") for given in (torch.device("cpu"), {"cpu:0"})),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_lists_that_cannot_be_computed_on(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_compute_devices(given, argument="compute_devices")


@pytest.mark.parametrize(
    ("given", "compute_devices", "chosen"),
    [
        (None, ("cuda:1",), "cuda:1"),
        (None, ("cuda:0", "cuda:1"), "cpu:0"),
        (None, ("cpu:0", "cpu:1"), "cpu:0"),
        ("CPU:2", ("cpu:0", "cpu:1"), "cpu:2"),
        ("GPU:1", ("cpu:0",), "cuda:1"),
        ("", ("cpu:0",), DeviceError),
        ("cuda:2", ("cpu:0",), DeviceError),
        (3, ("cpu:0",), WrongTypeError),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_where_central_storage_keeps_variables(given: Any, compute_devices: tuple[str, ...], chosen: Any) -> None:
    if isinstance(chosen, str):
        assert resolve_parameter_device(given, compute_devices) == chosen
    else:
        with pytest.raises(chosen):
            resolve_parameter_device(given, compute_devices)
