"""``strategy=tpu``: from settings to devices, and which of them make a replica."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torchstrat import registry
from torchstrat.cluster import ProcessPlan
from torchstrat.config import require, require_positive
from torchstrat.errors import InvalidArgumentError
from torchstrat.strategy import Strategy
from torchstrat.tpu import DeviceAssignment, initialize_tpu_system


def strategy(
    plan: ProcessPlan | None,
    replicas: int | None,
    logical_mesh_shape: Sequence[int],
    virtual_devices: int | None = None,
    **options: Any,
) -> Strategy:
    """Replicas times logical devices on a TPU, all driven by one process. Starts the TPU runtime of it if need be.

    Args:
        replicas: None: as many as there are devices for. Devices that are left over compute along and count nothing.
        virtual_devices: Let the CPU pretend to be so many devices. None: a TPU, or what ``PJRT_DEVICE`` in the
            environment says.
        options: Of the strategy's constructor.

    Raises:
        InvalidArgumentError: a launcher started several processes; there are not so many devices, or they cannot be
            cut into such replicas.
        DeviceError, UnsupportedError, ContextError: see `initialize_tpu_system`.
    """
    require_positive("strategy.virtual_devices", virtual_devices)
    require(
        plan is None or plan.size == 1,
        f"strategy=tpu drives all devices from one process, and a launcher started {plan.size if plan else 1}; run "
        "python scripts/train.py …, with strategy.replicas for their number.",
    )
    topology = initialize_tpu_system(virtual_devices=virtual_devices)
    mesh_shape: list[int] = topology.mesh_shape.tolist()
    shape = computation_shape(mesh_shape, math.prod(logical_mesh_shape))
    most = math.prod(mesh_shape) // math.prod(shape)
    require(
        replicas is None or replicas <= most,
        f"strategy.replicas={replicas} with {math.prod(shape)} logical device(s) each do not fit on "
        f"{math.prod(mesh_shape)} devices; use at most {most}, or fewer logical devices.",
    )
    assignment = DeviceAssignment.build(topology, shape, num_replicas=replicas or most)
    return registry.create("tpu", device_assignment=assignment, logical_mesh_shape=logical_mesh_shape, **options)


def computation_shape(mesh_shape: Sequence[int], logical_devices: int) -> list[int]:
    """The block of cores that becomes a replica: ``logical_devices`` of them, such that blocks fill the mesh.

    All cores of a chip before a second chip, and chips as near to a cube as they can be: what neighbours exchange then
    has the shortest way.

    Args:
        mesh_shape: devices along each axis of the topology, ``[x, y, z, core]``.

    Returns:
        The block's cores along each axis, for `DeviceAssignment.build`.

    Raises:
        InvalidArgumentError: no block of that size fills the mesh; the message has the sizes that do.
    """
    divisors = [[size for size in range(1, extent + 1) if extent % size == 0] for extent in mesh_shape]
    blocks = [*itertools.product(*divisors)]
    fitting = [block for block in blocks if math.prod(block) == logical_devices]
    if not fitting:
        possible = sorted({math.prod(block) for block in blocks})
        raise InvalidArgumentError(
            f"strategy.logical_devices={logical_devices}: blocks of so many devices do not fill the mesh "
            f"{list(mesh_shape)} (x, y, z, core); use one of {', '.join(map(str, possible))}."
        )
    return [*min(fitting, key=lambda block: (-block[-1], max(block[:-1]), [-size for size in block]))]
