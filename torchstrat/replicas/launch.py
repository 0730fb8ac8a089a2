"""From a plan of processes to an engine with one replica in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torchstrat.cluster import ProcessPlan
from torchstrat.devices import local_devices, require_present
from torchstrat.errors import DeviceError, InvalidArgumentError
from torchstrat.reduction import ReduceOp
from torchstrat.replicas.engine import ReplicaEngine

COLLECTIVES = ("auto", "shared_memory", "process_group")
"""How processes may talk: what is there, memory that they share on one host, or torch.distributed's process group."""


def check_collectives(collectives: str) -> str:
    if collectives not in COLLECTIVES:
        raise InvalidArgumentError(
            f"collectives={collectives!r} is not known; choose one of {', '.join(map(repr, COLLECTIVES))}."
        )
    return collectives


def own_device(devices: Sequence[Any] | None, plan: ProcessPlan) -> str:
    """The device of this process's replica: the one given, else the GPU of its local rank, else the CPU."""
    if devices is None:
        gpus = local_devices("cuda")
        if not gpus:
            return "cpu:0"
        if plan.local_rank >= len(gpus):
            raise DeviceError(
                f"{plan.name} has local rank {plan.local_rank} and this machine has {len(gpus)} GPUs; start at most "
                f"{len(gpus)} processes per machine, or pass the device to use."
            )
        return gpus[plan.local_rank]
    if isinstance(devices, str) or len(devices) != 1:
        raise DeviceError(
            f"under torchrun every process has one replica, so at most one device can be given; got {devices!r}. "
            "Leave the argument out to use the GPU of the local rank, or the CPU."
        )
    return require_present(devices[0])


def one_replica_per_process(
    strategy: Any,
    plan: ProcessPlan,
    device: str,
    op: ReduceOp,
    timeout: timedelta,
    *,
    central: bool,
    collectives: str,
    keeps_gradients: bool = False,
) -> ReplicaEngine:

    # Imported here: torch.distributed is only needed, and only loaded, where there are several processes.
    from torchstrat.collectives.choose import choose_communicator
    from torchstrat.replicas.per_process import PerProcessReplica

    communicator, why = choose_communicator(plan, device, timeout, collectives)
    return PerProcessReplica(
        strategy, communicator, device, op, central=central, communication=why, keeps_gradients=keeps_gradients
    )
