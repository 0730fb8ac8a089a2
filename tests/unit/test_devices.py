"""Device names: every accepted spelling, and every device that must be refused, without any accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchstrat import devices
from torchstrat.devices import canonical, require_present, resolve_compute_devices, resolve_parameter_device
from torchstrat.errors import DeviceError, WrongTypeError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count", lambda kind: 2 if kind == "cuda" else 0)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count", lambda kind: 0)


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


@pytest.mark.parametrize(
    "given", ["", " ", "c", "cpu:", "cpu:-1", "cpu:x", "cpu:1:2", "warp:0", "/device:CPU:*", "cpu 0"]
)
def test_what_is_no_device_is_named_in_the_error(given: str) -> None:
    with pytest.raises(DeviceError, match=r"cpu:1") as caught:
        canonical(given)
    assert repr(given) in str(caught.value)


def test_a_device_of_another_task_is_refused() -> None:
    with pytest.raises(DeviceError, match="another task"):
        canonical("/job:worker/replica:0/task:0/device:CPU:0")
    with pytest.raises(DeviceError, match="another task"):
        canonical("/job:localhost/replica:0/task:3/device:CPU:0")


@pytest.mark.parametrize("given", [0, None, 1.5, ["cpu"]])
def test_what_is_no_name_is_a_type_error(given: Any) -> None:
    with pytest.raises(WrongTypeError, match=type(given).__name__):
        canonical(given)


def test_virtual_cpus_share_the_one_cpu() -> None:
    assert devices.torch_device("cpu:7") == torch.device("cpu")
    assert devices.torch_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match="TPUStrategy"):
        devices.torch_device("/job:worker/task:0/device:TPU:0")


@pytest.mark.usefixtures("two_gpus")
def test_a_present_device_is_accepted_and_an_absent_one_is_not() -> None:
    assert require_present("GPU:1") == "cuda:1"
    with pytest.raises(DeviceError, match=r"'cuda:2' is not on this machine, which has cuda:0, cuda:1, cpu"):
        require_present("cuda:2")


def test_a_kind_without_a_runtime_is_absent() -> None:
    with pytest.raises(DeviceError, match="not on this machine"):
        require_present("meta")


@pytest.mark.usefixtures("two_gpus")
def test_the_default_is_every_gpu() -> None:
    assert resolve_compute_devices(None) == ("cuda:0", "cuda:1")


@pytest.mark.usefixtures("no_gpus")
def test_the_default_without_gpus_is_the_cpu() -> None:
    assert resolve_compute_devices(None) == ("cpu:0",)


def test_a_list_becomes_canonical_names_in_its_order() -> None:
    assert resolve_compute_devices(["/device:CPU:1", torch.device("cpu"), "cpu:5"]) == ("cpu:1", "cpu:0", "cpu:5")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "is empty"),
        ("cpu:0", r"compute_devices=\['cpu:0'\]"),
        (["cpu", "CPU:0"], "cpu:0 more than once"),
        (["cpu:0", "nonsense"], "'nonsense'"),
        (["cuda:99"], "'cuda:99' is not on this machine"),
    ],
)
@pytest.mark.usefixtures("no_gpus")
def test_lists_that_cannot_be_computed_on(given: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        resolve_compute_devices(given, argument="compute_devices")


@pytest.mark.parametrize("given", [2, torch.device("cpu"), {"cpu:0"}, [0]])
def test_lists_of_the_wrong_type(given: Any) -> None:
    with pytest.raises(WrongTypeError):
        resolve_compute_devices(given)


@pytest.mark.parametrize(
    ("given", "compute_devices", "chosen"),
    [
        (None, ("cuda:1",), "cuda:1"),
        (None, ("cuda:0", "cuda:1"), "cpu:0"),
        (None, ("cpu:0", "cpu:1"), "cpu:0"),
        ("CPU:2", ("cpu:0", "cpu:1"), "cpu:2"),
        ("GPU:1", ("cpu:0",), "cuda:1"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_where_central_storage_keeps_variables(given: Any, compute_devices: tuple[str, ...], chosen: str) -> None:
    assert resolve_parameter_device(given, compute_devices) == chosen


@pytest.mark.parametrize(("given", "error"), [("", DeviceError), ("cuda:2", DeviceError), (3, WrongTypeError)])
@pytest.mark.usefixtures("two_gpus")
def test_a_bad_parameter_device_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        resolve_parameter_device(given, ("cpu:0",))
