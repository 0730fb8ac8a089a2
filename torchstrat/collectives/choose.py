"""Which implementation of collectives a job gets: shared memory where every process is on one host, else sockets."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import NamedTuple

from torchstrat.cluster import ProcessPlan
from torchstrat.collectives.communicator import Communicator
from torchstrat.collectives.process_group import ProcessGroupCommunicator
from torchstrat.collectives.shared_memory.neighbours import NoSharedMemoryError, NotNeighboursError
from torchstrat.collectives.shm import SharedMemoryCommunicator
from torchstrat.errors import UnsupportedError


class Chosen(NamedTuple):
    communicator: Communicator
    why: str
    """What is in use and why, in words."""


def choose_communicator(plan: ProcessPlan, device: str, timeout: timedelta, collectives: str) -> Chosen:
    """Every process of the job calls it, with the same ``collectives``: "auto", "shared_memory" or "process_group".

    Raises `UnsupportedError`, on all of them, where shared memory was asked for and cannot be had.
    """
    sockets = ProcessGroupCommunicator(plan, device, timeout)
    if device.startswith("cuda"):
        return _without(sockets, collectives, "NCCL", "replicas compute on GPUs")
    if collectives == "process_group":
        return Chosen(sockets, "gloo, as was asked for")
    try:
        return Chosen(SharedMemoryCommunicator(sockets), f"shared memory: all {plan.size} processes are on this host")
    except NotNeighboursError as reason:
        if collectives == "auto" and isinstance(reason, NoSharedMemoryError):
            warnings.warn(
                f"the processes talk through sockets (gloo), which is slower, because they could not share memory: "
                f"{reason}. Pass collectives='process_group' if that is meant.",
                stacklevel=5,
            )
        return _without(sockets, collectives, "gloo", str(reason))


def _without(sockets: ProcessGroupCommunicator, collectives: str, name: str, reason: str) -> Chosen:
    if collectives == "shared_memory":
        sockets.close()
        raise UnsupportedError(
            f"collectives='shared_memory' was asked for, and shared memory cannot be used: {reason}. Leave the "
            "argument out to use what is there."
        )
    return Chosen(sockets, f"{name}, because {reason}")
