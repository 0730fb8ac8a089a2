"""The few operations that a strategy with one replica per process needs from the outside world.

Every method is collective: each process of the group calls it, in the same order. All block until done (or until
`timeout`), except where a `Work` is returned. Tensors stay on their own device.

A call that fails raises `CommunicationError`, and nothing is known of the group's state after that: each later call on
this communicator, its subgroups and its other channels raises at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from torchstrat.distributed.collectives.notes import Words
    from torchstrat.distributed.collectives.shared_memory.common_memory import Kind, Place
    from torchstrat.distributed.collectives.shared_memory.in_place_sum import Piece


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result is in place. Raises `CommunicationTimeoutError` after the group's timeout."""


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

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Any picklable value of every rank, in rank order."""

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        """Rank ``source``'s picklable value, on every rank."""

    def subgroup(self, ranks: tuple[int, ...]) -> Communicator:
        """The same for some ranks of the job; ``ranks[i]`` is rank i there. Every rank of the job calls it, also those
        that are not in it and cannot use the result. Kept for the next time."""

    def split(self) -> Communicator:
        """Another channel between all ranks for values in host memory, whose calls are ordered among themselves only.
        Every rank calls it. It goes when nobody refers to it any more."""

    def barrier(self, what: str) -> None:
        """Return once every rank has called it."""

    def report_failure(self, message: str, *, leaves: bool = False) -> None:
        """Tell the other ranks, without waiting for them, why this one stopped taking part.

        ``leaves``: ranks that wait for this one are told at once, where they share memory, instead of when they have
        waited long enough.
        """

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


@runtime_checkable
class SumsInPlace(Communicator, Protocol):
    """A `Communicator` that adds gradients up where they lie: collecting them in buckets would only cost copies."""

    def sum_in_place(self, tensors: Sequence[torch.Tensor], factor: float, what: str) -> None:
        """Replace each tensor (contiguous, in host memory, without a graph) by ``factor`` times its sum over all ranks.
        All ranks pass tensors of equal lengths and dtypes in one order, and get the same bits."""

    def all_gather_numbers_and_sum(
        self, numbers: Sequence[float], tensors: Sequence[torch.Tensor], what: str
    ) -> tuple[list[list[float]], Callable[[float], None] | None]:
        """`all_gather_numbers` that in the same meeting does what `sum_in_place` has to wait for, where ``tensors`` are
        small: the numbers, and a function that makes the sums, times the factor it is given. None where they are not,
        or of several dtypes. It may be called if the numbers tell that all ranks have passed tensors alike, and only
        before the next collective."""

    def sum_to_owners(
        self, tensors: Sequence[torch.Tensor], factor: float, owned: Sequence[Sequence[Piece]], what: str
    ) -> None:
        """The same for tensors of one dtype, where each rank needs but its own elements of the sum: ``owned`` are for
        each rank pieces of the tensors, which together are all of them. What others own is undefined afterwards."""


@runtime_checkable
class SharesMemory(Protocol):
    """A `Communicator` whose processes can have memory in common."""

    def share_memory(self, kinds: Sequence[Kind], what: str) -> list[Place]:
        """A place for a tensor of each kind, the same ones for all ranks, which pass equal kinds. All elements are 0.

        Raises `NoSharedMemoryError`, on all of them, if there is no room on one.
        """
