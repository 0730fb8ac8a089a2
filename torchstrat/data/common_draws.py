"""What one rank draws for all moves the random streams of the others, too, where they stood alike.

Else what a program draws after it (an image size for each batch, how rows of a batch are mixed) would differ from rank
to rank, and from one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torchstrat.data.own_draws import ProcessStreams, next_of, number_of
from torchstrat.data.random_states import RandomStreams


class Move(NamedTuple):
    """Of one stream."""

    stream: int | str
    """Which of the process's, or the name of another's state in `RandomStreams`."""
    before: int
    """A number for where it stood."""
    after: Any
    """Where it stands."""


class CommonDraws:
    """Notes on the drawing rank what has moved, and moves it on another: the process's streams, and ``generators``."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self._process, self._own = ProcessStreams(), RandomStreams((), generators)

    @contextmanager
    def noted(self) -> Iterator[list[Move]]:
        """What is drawn within this is in the list that it yields, afterwards."""
        before, moves = self._stand(), list[Move]()
        yield moves
        after = self._stand()
        moves += [Move(one, _mark(old), after[one]) for one, old in before.items() if not _same(old, after[one])]

    def follow(self, moves: Sequence[Move]) -> None:
        """On a rank that has not drawn. A stream that is its own, as of a rank that is seeded by itself, stays."""
        if not moves:
            return
        stand = self._stand()
        for move in moves:
            if move.stream in stand and _mark(stand[move.stream]) == move.before:
                stand[move.stream] = move.after
        self._process.put((stand[0], stand[1], stand[2]))
        self._own.put({name: state for name, state in stand.items() if isinstance(name, str)})

    def _stand(self) -> dict[int | str, Any]:
        stand: dict[int | str, object] = dict(enumerate(self._process.stand()))
        stand.update(self._own.own_states())
        return stand


def _same(one: object, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    # NumPy's, where the second of a pair of numbers is waiting, has arrays in it.
    return number_of(one) == number_of(other) if isinstance(one, dict) and isinstance(other, dict) else one == other


def _mark(state: object) -> int:
    if not isinstance(state, torch.Tensor):
        return number_of(state)
    generator = torch.Generator()  # a state of PyTorch's has bits that no draw sees
    generator.set_state(state)
    return next_of(generator)
