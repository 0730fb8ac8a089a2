"""``strategy=tpu``: from settings to devices, and which of them make a replica."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torchstrat import registry
from torchstrat.cluster import ProcessPlan
from torchstrat.config import ExperimentConfig, require, require_positive
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments.build import logical_mesh, rules
from torchstrat.strategy import Strategy
from torchstrat.tpu import DeviceAssignment, initialize_tpu_system


def strategy(
    config: ExperimentConfig,
    plan: ProcessPlan | None,
    replicas: int | None = None,
    virtual_devices: int | None = None,
    logical_devices: int | None = None,
    logical_mesh_shape: list[int] | None = None,
    sharding_rules: dict[str, Any] | None = None,
) -> Strategy:
    """Replicas times logical devices on a TPU, all driven by one process. Starts the TPU runtime of it if need be.

    Args:
        replicas: None: as many as there are devices for. Devices that are left over compute along and count nothing.
        virtual_devices: Let the CPU pretend to be so many devices. None: a TPU, or what ``PJRT_DEVICE`` in the
            environment says.
        logical_devices, logical_mesh_shape, sharding_rules: As for `build.mirrored`.

    Raises:
        InvalidArgumentError: a launcher started several processes; there are not so many devices, or they cannot be
            cut into such replicas.
        DeviceError, UnsupportedError, ContextError: see `initialize_tpu_system`.
    """
    require_positive("strategy.replicas", replicas)
    require_positive("strategy.virtual_devices", virtual_devices)
    logical = logical_mesh(logical_devices, logical_mesh_shape)
    require(
        plan is None or plan.size == 1,
        f"strategy=tpu drives all devices from one process, and a launcher started {plan.size if plan else 1}; run "
        "python scripts/train.py …, with strategy.replicas for their number.",
    )
    topology = initialize_tpu_system(virtual_devices=virtual_devices)
    mesh_shape: list[int] = topology.mesh_shape.tolist()
    shape = computation_shape(mesh_shape, math.prod(logical))
    most = math.prod(mesh_shape) // math.prod(shape)
    require(
        replicas is None or replicas <= most,
        f"strategy.replicas={replicas} with {math.prod(shape)} logical device(s) each do not fit on "
        f"{math.prod(mesh_shape)} devices; use at most {most}, or fewer logical devices.",
    )
    return registry.create(
        "tpu",
        device_assignment=DeviceAssignment.build(topology, shape, num_replicas=replicas or most),
        gradient_reduce_op=config.strategy.get("gradient_reduce_op", "mean"),
        sharding_rules=rules(config, logical, sharding_rules),
        logical_mesh_shape=logical,
    )


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
