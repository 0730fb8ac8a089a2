"""Device names: what users may write, the one spelling used everywhere else, and which devices a strategy gets.

The canonical spelling is PyTorch's with an index: ``cpu:1``, ``cuda:0``. ``cpu:i`` are virtual: they name replicas that
share one CPU, so every index exists and the strategy keeps it (a tensor's own device drops it). TPU names stay as
TensorFlow writes them, ``/job:worker/task:0/device:TPU:0``. Only functions that must know which devices this machine
has ask for them, when they are called.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from torchstrat.core.errors import DeviceError, WrongTypeError

DeviceLike = str | torch.device

_TENSORFLOW_NAME = re.compile(
    r"(?:/job:(?P<job>[A-Za-z][A-Za-z0-9_]*))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"/(?:device:)?(?P<kind>[A-Za-z]+):(?P<index>\d+)"
)
_SHORT_NAME = re.compile(r"(?:device:)?(?P<kind>[A-Za-z]+)(?::(?P<index>\d+))?")
_KINDS = {"gpu": "cuda"}  # TensorFlow's names for what PyTorch calls otherwise
_FORMS = "'cpu:1', 'cuda:0', 'GPU:0', '/device:CPU:1' or a torch.device"


def canonical(device: DeviceLike) -> str:
    """The one spelling of ``device``: ``cpu:1``, ``cuda:0``; a missing index is 0.

    Args:
        device: ``cpu``, ``CPU:1``, ``/device:CPU:1``, ``/job:localhost/replica:0/task:0/device:CPU:0``, ``GPU:0``,
            ``cuda:0``, a `torch.device`, or a TPU's name. Whether the device is present is not checked.

    Raises:
        WrongTypeError: ``device`` is neither a string nor a `torch.device`.
        DeviceError: it cannot be read as a device, or names one of another process.
    """
    if isinstance(device, torch.device):
        return f"{device.type}:{device.index or 0}"
    if not isinstance(device, str):
        raise WrongTypeError(
            f"a device is named by a string or a torch.device; got {type(device).__name__} {device!r}. "
            "Write 'cpu:0' or 'cuda:0'."
        )
    match = _TENSORFLOW_NAME.fullmatch(device) or _SHORT_NAME.fullmatch(device)
    if match is None:
        raise DeviceError(f"{device!r} is not a device name; write {_FORMS}.")
    parts = match.groupdict()
    kind = parts["kind"].lower()
    if kind == "tpu":
        return device
    if (parts.get("job") or "localhost") != "localhost" or int(parts.get("task") or 0):
        raise DeviceError(
            f"{device!r} is a device of another task; a strategy computes on the devices of its own process. "
            f"Leave the job and the task out, or start that task with its own strategy."
        )
    return f"{_parsed(_KINDS.get(kind, kind), device)}:{int(parts['index'] or 0)}"


def _parsed(kind: str, device: str) -> str:
    try:
        return torch.device(kind).type
    except RuntimeError:
        raise DeviceError(f"{device!r} names no kind of device that PyTorch knows; write {_FORMS}.") from None


def torch_device(name: str) -> torch.device:
    """The `torch.device` that tensors of the canonical device ``name`` live on; every ``cpu:i`` is plain ``cpu``."""
    kind, _, index = name.rpartition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if kind.lower().endswith("tpu"):
        raise DeviceError(f"{name!r} is a TPU, which holds no ordinary tensors; use TPUStrategy for it.")
    return torch.device(kind, int(index))


def require_present(device: DeviceLike) -> str:
    """`canonical` of ``device``, which this process must be able to put tensors on.

    Raises:
        DeviceError: the machine lacks it; the message names the devices there are.
    """
    name = canonical(device)
    where = torch_device(name)
    if where.type != "cpu" and (where.index or 0) >= _count(where.type):
        there = ", ".join([*local_devices(where.type), "cpu"])
        raise DeviceError(f"device {device!r} is not on this machine, which has {there}; choose one of these.")
    return name


def _count(kind: str) -> int:
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # a kind without a runtime, such as "meta"
        return 0
    available = module.is_available() if hasattr(module, "is_available") else True
    return int(module.device_count()) if available else 0


def local_devices(kind: str = "cuda") -> tuple[str, ...]:
    """The canonical names of this machine's devices of one kind; empty when it has none."""
    return tuple(f"{kind}:{index}" for index in range(_count(kind)))


def resolve_compute_devices(devices: Sequence[DeviceLike] | None, *, argument: str = "devices") -> tuple[str, ...]:
    """The canonical devices that the replicas of one process compute on, one per replica.

    Args:
        devices: The user's list; None means all local GPUs, or ``cpu:0`` where there is none.
        argument: What the strategy calls the list, for messages.

    Raises:
        WrongTypeError: ``devices`` is not a sequence of names.
        DeviceError: it is a bare string, is empty, or holds a device that is repeated, unparsable or absent.
    """
    if devices is None:
        return local_devices() or ("cpu:0",)
    if isinstance(devices, str):
        listed = [name.strip() for name in devices.split(",") if name.strip()] or ["cpu:0"]
        raise DeviceError(f"{argument}={devices!r} is one string; give a list of names: {argument}={listed!r}.")
    if isinstance(devices, bytes) or not isinstance(devices, Sequence):
        raise WrongTypeError(
            f"{argument} must be a list of device names or None; got {type(devices).__name__} {devices!r}. "
            f"Two replicas on one CPU are {argument}=['cpu:0', 'cpu:1']."
        )
    if not devices:
        raise DeviceError(f"{argument} is empty; name at least one device, or give None for all local ones.")
    names = tuple(require_present(device) for device in devices)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DeviceError(
            f"{argument}={list(devices)!r} names {', '.join(repeated)} more than once; every replica needs a device "
            "of its own. Several replicas on one CPU are 'cpu:0', 'cpu:1', and so on."
        )
    return names


def resolve_parameter_device(parameter_device: DeviceLike | None, compute_devices: Sequence[str]) -> str:
    """The canonical device that central storage keeps variables on.

    Args:
        parameter_device: The user's choice; None means the only compute device where there is exactly one, and
            otherwise ``cpu:0``.
        compute_devices: Canonical names, from `resolve_compute_devices`.

    Raises:
        WrongTypeError: ``parameter_device`` is neither a string nor a `torch.device`.
        DeviceError: it is unparsable or absent.
    """
    if parameter_device is not None:
        return require_present(parameter_device)
    return compute_devices[0] if len(compute_devices) == 1 else "cpu:0"
