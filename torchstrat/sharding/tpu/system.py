"""The TPU system of this process: its devices, real or virtual, found once."""

from __future__ import annotations

import glob
import math
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchstrat.core.errors import ContextError, DeviceError, InvalidArgumentError, WrongTypeError
from torchstrat.distributed.cluster_spec import ClusterSpec
from torchstrat.distributed.resolver_interface import ClusterResolver
from torchstrat.sharding.tpu.cluster_resolver import TPUClusterResolver
from torchstrat.sharding.tpu.coordinates import checked_mesh_shape, frozen
from torchstrat.sharding.tpu.runtime_devices import RuntimeDevices
from torchstrat.sharding.tpu.spmd import SpmdRuntime
from torchstrat.sharding.tpu.topology import Topology

PLATFORM, VIRTUAL_DEVICES = "PJRT_DEVICE", "CPU_NUM_DEVICES"
"""What torch_xla reads, once: the kind of device, and how many the CPU is to pretend to be."""

_TPU_DEVICE_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


@dataclass(frozen=True)
class TpuSystem:
    """``devices``: what the runtime's numbers of devices mean in ``topology``."""

    runtime: SpmdRuntime
    devices: RuntimeDevices

    @property
    def topology(self) -> Topology:
        return self.devices.topology


_lock = threading.Lock()
_system: TpuSystem | None = None


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None,
    *,
    virtual_devices: int | None = None,
    mesh_shape: Any = None,
) -> Topology:
    """Start the TPU runtime of this process and say which devices there are.

    Call it before the first backward pass of the process; making a `TPUStrategy` calls it too. Later calls return the
    same topology.

    Args:
        cluster_resolver: a `TPUClusterResolver`, or None for the TPU of this machine.
        virtual_devices: instead of a TPU, let the CPU pretend to be that many devices. For tests and development: all
            of it works as on a TPU, slowly. The environment variables ``PJRT_DEVICE=CPU`` and ``CPU_NUM_DEVICES`` do
            the same.
        mesh_shape: of virtual devices, ``[x, y, z, core]`` or ``[x, y, core]``; by default two cores on each chip, the
            chips in a rectangle.

    Raises:
        DeviceError: there is no TPU.
        UnsupportedError: torch_xla is missing or of another release than torch; autograd has been used before.
        InvalidArgumentError: ``mesh_shape`` does not fit the number of devices.
        ContextError: the system runs already, with another number of devices or another shape.
    """
    if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
        raise WrongTypeError(
            "initialize_tpu_system needs a TPUClusterResolver or None; got "
            f"{type(cluster_resolver).__name__} {cluster_resolver!r:.80}."
        )
    with _lock:
        if _system is None:
            system = _start(virtual_devices, mesh_shape)
        else:
            system = _system
            _require_same(system, virtual_devices, mesh_shape)
    if isinstance(cluster_resolver, TPUClusterResolver):
        cluster_resolver.set_tpu_topology(system.topology.serialized())
    return system.topology


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterResolver | ClusterSpec,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: Any = None,
) -> None:
    """TensorFlow's way to make a TPU's devices known to the program. Does nothing here, and may be left out: the
    runtime finds the devices of its host by itself.

    Raises:
        WrongTypeError: the first argument is neither a cluster resolver nor a `ClusterSpec`.
    """
    if not isinstance(cluster_spec_or_resolver, ClusterResolver | ClusterSpec):
        raise WrongTypeError(
            "experimental_connect_to_cluster needs a cluster resolver or a ClusterSpec; got "
            f"{type(cluster_spec_or_resolver).__name__} {cluster_spec_or_resolver!r:.80}."
        )


def the_system() -> TpuSystem:
    """The system of this process, started if need be."""
    with _lock:
        return _system if _system is not None else _start(None, None)


def _start(virtual_devices: int | None, mesh_shape: Any) -> TpuSystem:
    global _system
    shape = None if mesh_shape is None else checked_mesh_shape(mesh_shape)
    if virtual_devices is not None:
        _ask_for_virtual_devices(virtual_devices, shape)
    _require_devices()
    from torchstrat.sharding.tpu.runtime import xla_runtime

    _system = system_of(xla_runtime(), shape)
    return _system


def system_of(runtime: SpmdRuntime, mesh_shape: tuple[int, ...] | None = None) -> TpuSystem:
    """The system that ``runtime`` describes; where its devices have no places, ``mesh_shape`` gives them some."""
    attributes = runtime.device_attributes()
    if all("coords" in one for one in attributes):
        if mesh_shape is not None:
            raise InvalidArgumentError(
                f"mesh_shape={list(mesh_shape)} is for virtual devices; those of {runtime.name} have places of their "
                "own."
            )
        processes = [int(one.get("process_index", 0)) for one in attributes]
        return TpuSystem(runtime, RuntimeDevices.from_attributes(attributes, processes))
    shape = mesh_shape or default_mesh_shape(runtime.num_devices)
    if math.prod(shape) != runtime.num_devices:
        raise InvalidArgumentError(
            f"mesh_shape={list(shape)} has {math.prod(shape)} places for {runtime.num_devices} devices "
            f"({runtime.name}); the product of its entries has to be that number."
        )
    numbers = frozen(np.arange(runtime.num_devices, dtype=np.int64))
    return TpuSystem(runtime, RuntimeDevices(Topology.virtual(shape), numbers))


def default_mesh_shape(devices: int) -> tuple[int, int, int, int]:
    """Two cores on each chip where that divides, and chips in the rectangle nearest to a square."""
    cores = 2 if devices % 2 == 0 else 1
    chips = devices // cores
    x = max(size for size in range(1, math.isqrt(chips) + 1) if chips % size == 0)
    return chips // x, x, 1, cores


def _ask_for_virtual_devices(count: int, shape: tuple[int, ...] | None) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgumentError(f"virtual_devices={count!r} must be an int of at least 1.")
    if shape is not None and math.prod(shape) != count:
        raise InvalidArgumentError(
            f"mesh_shape={list(shape)} has {math.prod(shape)} places for virtual_devices={count}; these must agree."
        )
    for name, wanted in ((PLATFORM, "CPU"), (VIRTUAL_DEVICES, str(count))):
        given = os.environ.get(name)
        if given not in (None, wanted):
            raise InvalidArgumentError(
                f"virtual_devices={count} needs {name}={wanted}, and the environment says {name}={given}; unset it, or "
                "leave virtual_devices out."
            )
        os.environ[name] = wanted


def _require_devices() -> None:
    """torch_xla without a TPU would quietly take the CPU as one device."""
    if os.environ.get(PLATFORM):
        return
    if not any(glob.glob(pattern) for pattern in _TPU_DEVICE_FILES):
        raise DeviceError(
            f"no TPU was found on this machine (no {' or '.join(_TPU_DEVICE_FILES)}), and {PLATFORM} is not set. "
            "Without one use virtual devices: ts.tpu.initialize_tpu_system(virtual_devices=8) at the start of the "
            f"program, or {PLATFORM}=CPU {VIRTUAL_DEVICES}=8 in the environment."
        )
    if sys.platform != "linux":
        raise DeviceError(f"TPUs are driven from Linux only; this is {sys.platform}.")


def _require_same(system: TpuSystem, virtual_devices: int | None, mesh_shape: Any) -> None:
    topology = system.topology
    wanted = None if mesh_shape is None else checked_mesh_shape(mesh_shape)
    devices = system.runtime.num_devices
    if virtual_devices not in (None, devices) or (wanted is not None and wanted != tuple(topology.mesh_shape.tolist())):
        raise ContextError(
            f"the TPU system of this process runs with {devices} devices in a mesh of {topology.mesh_shape.tolist()}; "
            f"it cannot be initialized again with virtual_devices={virtual_devices}, mesh_shape={mesh_shape}. Once in "
            "a process is all there is: start another process."
        )
