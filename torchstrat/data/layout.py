"""The layout of replicas as input sees it, and how the rows of a global batch are divided over them.

The layout says which replicas exist, which of them live in this process, and where they compute. The division is pure
arithmetic, without tensors. There are two rules, and TensorFlow applies one or the other by the sharding policy (see
`AutoShardPolicy`). Neither loses a row here.

* *Equal chunks*: each batch by itself; every replica gets ``ceil(rows / n)`` rows until none are left.
* *Fixed sizes*: sizes follow from the declared batch size alone and are applied in turn to the stream of rows, across
  the borders of batches; what is left at the end fills the first replicas first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
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


def equal_chunks(rows: int, num_replicas: int) -> tuple[int, ...]:
    """Rows of each replica under the equal-chunk rule: 5 rows over 4 replicas are ``(2, 2, 1, 0)``."""
    chunk = -(-rows // num_replicas)
    return tuple(max(0, min(chunk, rows - replica * chunk)) for replica in range(num_replicas))


def fixed_sizes(global_batch: int, num_replicas: int) -> tuple[int, ...]:
    """Rows of each replica under the fixed-size rule: 5 rows over 4 replicas are ``(2, 1, 1, 1)``."""
    each, left_over = divmod(global_batch, num_replicas)
    return tuple(each + (replica < left_over) for replica in range(num_replicas))


def batch_sizes_for_worker(
    global_batch: int, num_workers: int, num_replicas_per_worker: int, worker_index: int
) -> tuple[int, ...]:
    """The sizes that one worker cuts from its own stream of rows under the fixed-size rule, in turn and cyclically.

    Each worker reads all rows of each of its batches, so one batch lasts ``num_workers`` steps. Workers start at
    different places of the same cycle: the sizes of all workers in one step add up to ``global_batch``.

    Args:
        global_batch: rows of a full global batch.
        num_workers: processes.
        num_replicas_per_worker: replicas in each process.
        worker_index: this process, from 0.

    Returns:
        ``num_workers * num_replicas_per_worker`` sizes; the first ``num_replicas_per_worker`` are for the first step.

    Raises:
        InvalidArgumentError: a negative batch, no workers or replicas, or a worker that does not exist.
        WrongTypeError: an argument that is not an int.
    """
    arguments = {
        "global_batch": (global_batch, 0),
        "num_workers": (num_workers, 1),
        "num_replicas_per_worker": (num_replicas_per_worker, 1),
        "worker_index": (worker_index, 0),
    }
    for name, (value, least) in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise WrongTypeError(f"{name} must be an int; got {value!r}.")
        if value < least:
            raise InvalidArgumentError(f"{name}={value} must be at least {least}.")
    if worker_index >= num_workers:
        raise InvalidArgumentError(f"worker_index={worker_index} must be below num_workers={num_workers}.")
    cycle = fixed_sizes(global_batch, num_workers * num_replicas_per_worker)
    start = worker_index * num_replicas_per_worker
    return cycle[start:] + cycle[:start]
