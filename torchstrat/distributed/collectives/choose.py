"""Which implementation of collectives a job gets: shared memory where every process is on one host, else sockets."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import NamedTuple

from torchstrat.core.errors import UnsupportedError
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.distributed.collectives.communicator import Communicator
from torchstrat.distributed.collectives.process_group import ProcessGroupCommunicator
from torchstrat.distributed.collectives.shared_memory.device_copies import DeviceCopies
from torchstrat.distributed.collectives.shared_memory.neighbours import NoSharedMemoryError, NotNeighboursError
from torchstrat.distributed.collectives.shm import SharedMemoryCommunicator


class Chosen(NamedTuple):
    communicator: Communicator
    why: str
    """What is in use and why, in words."""


def choose_communicator(
    plan: ProcessPlan, device: str, timeout: timedelta, collectives: str, copies: DeviceCopies | None = None
) -> Chosen:
    """Every process of the job calls it, with the same ``collectives``: "auto", "shared_memory" or "process_group".

    ``copies``: of a rank on a device whose gradients are to meet in host memory. Without them those on GPUs use NCCL.

    Raises `UnsupportedError`, on all of them, where shared memory was asked for and cannot be had.
    """
    is_on_gpu = device.startswith("cuda")
    if collectives == "process_group":
        name = "NCCL" if is_on_gpu else "gloo"
        return Chosen(ProcessGroupCommunicator(plan, device, timeout), f"{name}, as was asked for")
    if is_on_gpu and copies is None:
        sockets = ProcessGroupCommunicator(plan, device, timeout)
        return _without(sockets, collectives, "NCCL", "replicas compute on GPUs")
    sockets = ProcessGroupCommunicator(plan, "cpu", timeout)
    try:
        why = f"shared memory: all {plan.size} processes are on this host"
        if copies is not None:
            why += ", and copy between it and their devices"
        return Chosen(SharedMemoryCommunicator(sockets, copies), why)
    except NotNeighboursError as reason:
        name = "NCCL" if is_on_gpu else "gloo"
        if collectives == "auto" and isinstance(reason, NoSharedMemoryError):
            warnings.warn(
                f"the processes talk through sockets ({name}), which is slower, because they could not share memory: "
                f"{reason}. Pass collectives='process_group' if that is meant.",
                stacklevel=5,
            )
        if collectives == "auto" and is_on_gpu:
            sockets.close()
            sockets = ProcessGroupCommunicator(plan, device, timeout)
        return _without(sockets, collectives, name, str(reason))


def _without(sockets: ProcessGroupCommunicator, collectives: str, name: str, reason: str) -> Chosen:
    if collectives == "shared_memory":
        sockets.close()
        raise UnsupportedError(
            f"collectives='shared_memory' was asked for, and shared memory cannot be used: {reason}. Leave the "
            "argument out to use what is there."
        )
    return Chosen(sockets, f"{name}, because {reason}")
