"""The few operations that a strategy with one replica per process needs from the outside world.

Every method is collective: each process of the group calls it, in the same order. All block until done (or until
`timeout`), except where a `Work` is returned. Tensors stay on their own device.

A call that fails raises `CommunicationError`, and nothing is known of the group's state after that: each later call on
this communicator, its subgroups and its other channels raises at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Protocol

import torch


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
