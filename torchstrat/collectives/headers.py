"""What ranks send each other first, so that those in other calls are found before any of their data is mixed up.

All first messages are equally long: gloo would end a process that receives more than it expects.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

AGREEMENT, OBJECT = 1.0, -1.0
"""Kinds of calls: an agreement, whose numbers are all there is to send, or objects, which follow."""

_WIDTH = 12
_PADDING = (0.0,) * (_WIDTH - 1)


@functools.lru_cache(maxsize=4096)
def code(text: str) -> float:
    """A number for a text that a float64 holds exactly, the same in every process; positive."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little"))


def header(kind: float, call: str, numbers: Sequence[float]) -> tuple[float, ...]:
    """The numbers (at most 11) of a ``call``, behind a number that stands for its kind and its name."""
    assert len(numbers) < _WIDTH
    return (kind * code(call), *numbers, *_PADDING[len(numbers) :])


def is_of(kind: float, first: Sequence[float]) -> bool:
    """Whether a rank's first message is that of a call of this kind."""
    return first[0] * kind > 0


def numbers_in(messages: Sequence[list[float]], count: int) -> list[list[float]]:
    """What each rank gave to `header`."""
    return [first[1 : count + 1] for first in messages]


def length_in(first: Sequence[float]) -> int:
    """Of the object that follows a first message."""
    return int(first[1])
