"""The few operations that a strategy with one replica per process needs from the outside world.

Every method is collective: each process of the group calls it, in the same order. All block until done (or until
`timeout`), except where a `Work` is returned. Tensors stay on their own device.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch


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
        """Start summing ``tensor`` (any shape, contiguous) over all ranks, in place. ``what`` names it in errors."""

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Overwrite ``tensor`` (contiguous) on every rank with that of rank ``source``."""

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """The tensors of all ranks, in rank order. Shapes and dtypes must be equal; see `all_gather_object`."""

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Any picklable value of every rank, in rank order."""

    def broadcast_object(self, value: Any, source: int, what: str) -> Any:
        """Rank ``source``'s picklable value, on every rank."""

    def subgroup(self, ranks: tuple[int, ...]) -> Communicator:
        """The same for some of the ranks; only these call it. ``ranks[i]`` is rank i there. Kept for the next time."""

    def split(self) -> Communicator:
        """Another channel between all ranks, whose calls are ordered among themselves only. Every rank calls it."""

    def barrier(self, what: str) -> None:
        """Return once every rank has called it."""

    def report_failure(self, message: str) -> None:
        """Tell the other ranks, without waiting for them, why this one stopped taking part."""

    def close(self) -> None:
        """Leave the group; destroys a process group that this object made."""
