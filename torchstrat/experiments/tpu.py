"""``strategy=tpu``: from settings to devices, and which of them make a replica."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torchstrat import registry
from torchstrat.cluster import ProcessPlan
from torchstrat.config import ExperimentConfig, TpuConfig
from torchstrat.errors import InvalidArgumentError
from torchstrat.experiments import models
from torchstrat.sharding import logical_axis
from torchstrat.strategy import Strategy
from torchstrat.tpu import DeviceAssignment, initialize_tpu_system


def strategy(config: ExperimentConfig, chosen: TpuConfig, plan: ProcessPlan | None) -> Strategy:
    """The strategy on the devices that ``chosen`` asks for. Starts the TPU runtime of this process if need be.

    Raises:
        InvalidArgumentError: a launcher started several processes; there are not so many devices, or they cannot be
            cut into such replicas.
        DeviceError, UnsupportedError, ContextError: see `initialize_tpu_system`.
    """
    if plan is not None and plan.size > 1:
        raise InvalidArgumentError(
            f"strategy=tpu drives all devices from one process, and a launcher started {plan.size}; run python "
            "scripts/train.py …, with strategy.replicas for their number."
        )
    topology = initialize_tpu_system(virtual_devices=chosen.virtual_devices)
    mesh_shape: list[int] = topology.mesh_shape.tolist()
    logical_mesh = chosen.logical_mesh
    shape = computation_shape(mesh_shape, math.prod(logical_mesh))
    most = math.prod(mesh_shape) // math.prod(shape)
    if chosen.replicas is not None and chosen.replicas > most:
        raise InvalidArgumentError(
            f"strategy.replicas={chosen.replicas} with {math.prod(shape)} logical device(s) each do not fit on "
            f"{math.prod(mesh_shape)} devices; use at most {most}, or fewer logical devices."
        )
    axes = [logical_axis(index) for index in range(len(logical_mesh))]
    return registry.create(
        chosen.name,
        device_assignment=DeviceAssignment.build(topology, shape, num_replicas=chosen.replicas or most),
        gradient_reduce_op=chosen.gradient_reduce_op,
        sharding_rules=chosen.sharding_rules or models.sharding_rules(config.model, axes),
        logical_mesh_shape=logical_mesh,
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
