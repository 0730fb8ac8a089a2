"""What some communicators can do besides: the optional abilities of those whose processes have memory in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from torchstrat.core.communicator import Communicator

if TYPE_CHECKING:
    from torchstrat.distributed.collectives.shared_memory.common_memory import Kind, Place
    from torchstrat.distributed.collectives.shared_memory.in_place_sum import Piece


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
