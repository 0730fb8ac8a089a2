"""The interfaces below a strategy: its engine, which runs replicas, and the few operations between processes.

Each has several implementations. Of engines, `replicas.in_process` runs several replicas in this process,
`replicas.per_process` one replica in each process of a job, `sharding` one on several devices. `InputLayout` is the
engine as its input pipelines see it.

Every method of a `Communicator` is collective: each process of the group calls it, in the same order. All block until
done (or until `timeout`), except where a `Work` is returned. Tensors stay on their own device. A call that fails raises
`CommunicationError`, and nothing is known of the group's state after that: each later call on this communicator, its
subgroups and its other channels raises at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch

from torchstrat.core.memory import Copies
from torchstrat.core.reduction import Axis, ReduceOp
from torchstrat.core.values import BatchInfo, PerReplica
from torchstrat.core.variables import VariableRegistry


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result is in place. Raises `CommunicationTimeoutError` after the group's timeout."""


class Done:
    """A collective that is over."""

    def wait(self) -> None:
        return None


class Words(Protocol):
    """What all ranks say about one thing, as one rank sees it."""

    def tell(self, word: str) -> None:
        """Leave this rank's, for good and without waiting. The first counts."""

    def of_all(self) -> dict[int, str]:
        """Every rank's word, as soon as all are there.

        A store that does not answer for a while is asked again. Raises `CommunicationTimeoutError` where a word does
        not come in time, and `CommunicationError` where a rank has ended without one, or waits for this one in another
        call.
        """


class Communicator(Protocol):
    """Talks to the other processes of a job. ``rank`` is this process's place among ``size``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, as ranks of the whole job: what errors name. ``ranks[rank]`` is this process."""

    @property
    def timeout(self) -> timedelta: ...

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Work:
        """Start summing ``tensor`` (any shape and dtype, contiguous) over all ranks, in place. All ranks get the same
        bits. ``what`` names it in errors."""

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Overwrite ``tensor`` (any dtype, contiguous) on every rank with that of rank ``source``."""

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """The tensors of all ranks, in rank order. Shapes and dtypes must be equal; see `all_gather_object`."""

    def all_gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        """A few numbers of every rank, equally many, as float64, in rank order."""

    def all_gather_object(self, value: object, what: str) -> list[Any]:
        """Any picklable value of every rank, in rank order."""

    def broadcast_object(self, value: object, source: int, what: str) -> Any:
        """Rank ``source``'s picklable value, on every rank."""

    def subgroup(self, ranks: tuple[int, ...]) -> Communicator:
        """The same for some ranks of the job; ``ranks[i]`` is rank i there. Every rank of the job calls it, also those
        that are not in it and cannot use the result. Kept for the next time."""

    def split(self) -> Communicator:
        """Another channel between all ranks for values in host memory, whose calls are ordered among themselves only.
        Every rank calls it. It goes when nobody refers to it any more."""

    def barrier(self, what: str) -> None:
        """Return once every rank has called it."""

    def named(self, what: str) -> str:
        """The name of a call, by which ranks find that they are in the same; see `leave_run`."""

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        """Tell the other ranks, without waiting for them, why this one stopped taking part.

        ``leaves``: ranks that wait for this one are told at once, where they share memory, instead of when they have
        waited long enough.
        """

    def leave_run(self) -> None:
        """This rank's run has raised, maybe no other's. Where the program goes on, what this rank calls from now on is
        another call than those of a rank that has left fewer: one of them may be of the run that was left."""

    def words(self, what: str) -> Words:
        """What all ranks will say about one thing. Every rank asks for it, for the same things in the same order.
        ``what`` names it in errors."""

    def calls_differ(self, what: str, *, is_over: bool) -> str:
        """What each rank called, as an error's text, where all have met and this one had called ``what``. All of them
        ask. ``is_over``: no call on this communicator can follow."""

    def forget_failure(self) -> None:
        """Take back what `report_failure` said: this rank takes part again."""

    def close(self) -> None:
        """Leave the group; destroys a process group that this object made."""


_within: ContextVar[str] = ContextVar("_within", default="")


@contextmanager
def within(call: str) -> Iterator[None]:
    """What this rank agrees on in the block is a part of this ``call``. Others, with exchanges that look the same but
    are part of another call, are found by it: numbers of both would be combined."""
    token = _within.set(f"{call}: ")
    try:
        yield
    finally:
        _within.reset(token)


def in_full(call: str) -> str:
    """The name of a call, with that of the one which it is a part of."""
    return _within.get() + call


class BatchPlacement(Protocol):
    """Starts copies ahead of time; see `torchstrat.data.prefetch.Placement`, the usual one."""

    @property
    def copies(self) -> bool:
        """Whether there is anything to copy for batches that are made on the host."""

    def place(self, step: Any) -> tuple[Any, tuple[Any, ...]]: ...
    def receive(self, placed: tuple[Any, tuple[object, ...]]) -> Any: ...


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
    num_workers: int = 1
    """Processes, each with an input pipeline of its own."""
    worker_index: int = 0
    always_wrap: bool = False
    """Hand out `PerReplica` even for one replica. False: with one replica, batches are handed out bare."""
    communicator: Communicator | None = None
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


class ReplicaStates(Protocol):
    """What the replicas of this process have for themselves, by what checkpoints call them: ``replica_<id>``, or
    ``lanes`` for one stream of random numbers of all replicas."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What ``state`` does not have begins with the seed in force."""


class MakesRounds(Protocol):
    """An engine whose replicas step variables of their own."""

    def end_round(self) -> None:
        """Bring them together now, between runs. Every process calls it."""


class ReplicaEngine(Protocol):
    """Runs functions on replicas and lets replicas talk to each other."""

    registry: VariableRegistry
    gradient_op: ReduceOp

    @property
    def num_replicas(self) -> int:
        """Replicas in the whole job."""

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """Ids of the replicas in this process."""

    @property
    def is_chief(self) -> bool:
        return True

    @property
    def layout(self) -> InputLayout: ...

    @property
    def communication(self) -> str:
        """How the replicas talk to each other, and why so, in words."""

    @property
    def everyone(self) -> Communicator | None:
        """All processes of the job, for calls that each has to make; None where this is the only one, or closed."""
        return None

    @property
    def rounds(self) -> MakesRounds | None:
        """None where replicas are equal between runs."""
        return None

    def device_of_replica(self, replica: int) -> str: ...

    @property
    def replica_states(self) -> ReplicaStates:
        """For checkpoints, and not during a run: the replicas' streams of random numbers, and with local steps the
        variables and optimizer state of each."""

    def copies(self) -> list[Copies]:
        """Who keeps how many copies of what, over all processes: the basis of memory estimates."""

    # cross-replica context
    def scope_opened(self) -> None: ...
    def scope_closed(self, *, failed: bool = False) -> None:
        """``failed``: by an exception, which other processes may not have seen; then nothing is exchanged."""

    def run(self, fn: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> Any: ...
    def reduce(self, op: ReduceOp, value: object, axis: Axis) -> Any: ...

    def weighted_mean(self, value: object) -> object:
        """The mean of the components by what their replicas counted in the run that returned them."""

    def gather(self, value: object, axis: int) -> Any: ...
    def set_no_sync(self, active: bool) -> None: ...

    def check_replicas(self, when: str) -> None:
        """Raise `ReplicaDriftError` where replicas have other values of what has to be equal. Collective."""

    def close(self) -> None: ...

    # replica context
    def all_reduce(self, op: ReduceOp, value: object) -> Any: ...
    def all_gather(self, value: object, axis: int) -> Any: ...
    def merge_call(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any: ...
    def set_weight(self, weight: float) -> None: ...

    def relative_weight(self) -> float:
        """How much the running replica counts in the mean gradient; 1 for each where a batch was split evenly."""

    def span_replicas(self) -> None:
        """What the running replica differentiates may come over from others, by their weights."""

    def sync_batch_norm(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """Batch normalisation of ``x`` in training, over all replicas, where the engine has a way of its own; None: by
        `all_gather`."""
        return None
