"""What one rank draws for all moves the process's random streams of the others, too, where they stood alike.

Else what a program draws after it (an image size for each batch, a layer to leave out) would differ from rank to rank,
and from one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torchstrat.data.own_draws import ProcessStreams, next_of, number_of


class Move(NamedTuple):
    """Of one stream."""

    stream: int
    """Which of `ProcessStreams.stand`."""
    before: int
    """A number for where it stood."""
    after: Any
    """Where it stands."""


class CommonDraws:
    """Notes on the drawing rank what has moved, and moves it on another."""

    def __init__(self) -> None:
        self._streams = ProcessStreams()

    @contextmanager
    def noted(self) -> Iterator[list[Move]]:
        """What is drawn within this is in the list that it yields, afterwards."""
        before, moves = self._streams.stand(), list[Move]()
        yield moves
        after = self._streams.stand()
        for stream, (old, new) in enumerate(zip(before, after, strict=True)):
            if not _same(old, new):
                moves.append(Move(stream, _MARKS[stream](old), new))

    def follow(self, moves: Sequence[Move]) -> None:
        """On a rank that has not drawn. A stream that is its own, as of a rank that is seeded by itself, stays."""
        if not moves:
            return
        stand = self._streams.stand()
        alike = [move for move in moves if _MARKS[move.stream](stand[move.stream]) == move.before]
        places = list(stand)
        for move in alike:
            places[move.stream] = move.after
        if alike:
            self._streams.put((places[0], places[1], places[2]))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    # NumPy's, where the second of a pair of numbers is waiting, has arrays in it.
    return number_of(one) == number_of(other) if isinstance(one, dict) and isinstance(other, dict) else one == other


def _next_of(state: torch.Tensor) -> int:
    # A state has bits that no draw sees.
    generator = torch.Generator()
    generator.set_state(state)
    return next_of(generator)


_MARKS: tuple[Callable[[Any], int], ...] = (_next_of, number_of, number_of)
