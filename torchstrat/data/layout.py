"""Which replicas exist, which of them live in this process, and where they compute: all that input needs to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from torchstrat.core.values import BatchInfo, PerReplica
from torchstrat.distributed.collectives.communicator import Communicator


class BatchPlacement(Protocol):
    """Starts copies ahead of time; see `torchstrat.data.prefetch.Placement`, the usual one."""

    @property
    def copies(self) -> bool:
        """Whether there is anything to copy for batches that are made on the host."""

    def place(self, step: Any) -> tuple[Any, tuple[Any, ...]]: ...
    def receive(self, placed: tuple[Any, tuple[Any, ...]]) -> Any: ...


@dataclass(frozen=True)
class InputLayout:
    """The replicas of a strategy as its input pipelines see them. Built by the strategy, equal on all ranks but for
    ``local_replicas``, ``devices`` and ``worker_index``."""

    num_replicas: int
    """Replicas of the whole group, over all processes."""
    local_replicas: tuple[int, ...]
    """Ids, in the group, of the replicas of this process; consecutive, and as many in every process."""
    devices: tuple[torch.device, ...]
    """Where each local replica computes; the virtual replicas ``cpu:i`` are all ``torch.device("cpu")``."""
    num_workers: int
    """Processes, each with an input pipeline of its own."""
    worker_index: int
    always_wrap: bool
    """Hand out `PerReplica` even for one replica. False: with one replica, batches are handed out bare."""
    communicator: Communicator | None
    """The way to the other processes; None in a single process."""
    per_replica_input: Literal["honoured", "refused"] = "honoured"
    """What `InputReplicationMode.PER_REPLICA` means to this strategy: a pipeline for each replica, or nothing (one
    device)."""
    placement: BatchPlacement | None = None
    """How batches get to the devices, where that is not a copy of each replica's to its own."""
    join: Callable[[tuple[Any, ...], tuple[int, ...], BatchInfo], PerReplica[Any]] | None = None
    """From the replicas' values of a leaf, their ids and how the batch was split to what is handed out; None: a
    `PerReplica` of them."""

    @property
    def bare(self) -> bool:
        """Whether batches are handed out without a wrapper, as the dataset made them."""
        return self.num_replicas == 1 and not self.always_wrap

    @property
    def peers(self) -> Communicator | None:
        """The communicator where there is anybody to talk to, else None."""
        return self.communicator if self.num_workers > 1 else None
