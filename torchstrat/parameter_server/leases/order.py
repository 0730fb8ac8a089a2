"""The order in which an epoch's rows are handed out: position → number of the row in the dataset.

A shuffled order is computed, not stored. `ShuffledOrder` is a permutation keyed by seed and epoch, of which any part
costs the same at any time: an epoch of a billion rows begins at once, is resumed anywhere, and takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchstrat.core.errors import InvalidArgumentError
from torchstrat.parameter_server.leases.intervals import Interval

RowNumbers = npt.NDArray[np.int64]
DrawOrder = Callable[[int], Iterable[int]]
"""An order of the user's own: the number of an epoch → its rows. Called again for an epoch that is resumed."""


class RowOrder(Protocol):
    """The order of one epoch."""

    def rows(self, start: int, stop: int) -> RowNumbers:
        """The rows at positions ``[start, stop)``. Called with the lowest positions first, and again for those that are
        handed out again."""

    def forget(self, start: int, stop: int) -> None:
        """These positions will not be asked for again."""


def rows_at(order: RowOrder, positions: Iterable[Interval]) -> RowNumbers:
    """The rows at several intervals of positions, one after the other."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(order.rows(start, stop) for start, stop in positions)])


class InOrder:
    """As the dataset has them."""

    def rows(self, start: int, stop: int) -> RowNumbers:
        return np.arange(start, stop, dtype=np.int64)

    def forget(self, start: int, stop: int) -> None: ...


class ShuffledOrder:
    """A pseudorandom permutation of ``rows`` rows, the same on every machine and with every version of torch and NumPy.

    An unbalanced Feistel network over pairs of digits, walked until it ends below ``rows`` (Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002). The square of digits is hardly larger than the number of rows, so second
    steps are rare. It is even: over an odd one a round is an even permutation, and half of all orders of a few rows
    would hardly come up. The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """

    def __init__(self, rows: int, seed: int, epoch: int) -> None:
        self._rows = rows
        root = math.isqrt(max(rows - 1, 0)) + 1
        self._digits = np.uint64(root + root % 2)
        key = _mix_number(_mix_number(seed) + epoch)
        self._keys = [np.uint64(_mix_number(key + number * _GOLDEN)) for number in range(_ROUNDS)]
        self._block = -1, np.empty(0, dtype=np.int64)

    def rows(self, start: int, stop: int) -> RowNumbers:
        blocks = range(start // _BLOCK, -(-stop // _BLOCK))
        parts = [self._block_of(n)[max(start - n * _BLOCK, 0) : stop - n * _BLOCK] for n in blocks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def _block_of(self, block: int) -> RowNumbers:
        """The rows at positions ``[block * _BLOCK, …)``: 4096 at a time take 0.3 ms, and 64 would take 0.1 ms."""
        known, rows = self._block
        if known != block:
            found = self._step(np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self._rows), dtype=np.uint64))
            while (beyond := found >= self._rows).any():
                found[beyond] = self._step(found[beyond])
            rows = found.astype(np.int64)
            self._block = block, rows
        return rows

    def forget(self, start: int, stop: int) -> None: ...

    def _step(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = numbers // self._digits, numbers % self._digits
        for key in self._keys:
            left, right = right, (left + _mix(right ^ key) % self._digits) % self._digits
        joined: npt.NDArray[np.uint64] = left * self._digits + right
        return joined


class DrawnOrder:
    """What the user's own order gives, drawn as it is needed.

    Keeps the rows that were handed out and may come back, and a byte for each of the dataset's rows, to notice an order
    that names one twice.
    """

    def __init__(self, draw: Iterable[int], rows: int, epoch: int) -> None:
        self._draw = iter(draw)
        self._number = rows
        self._epoch = epoch
        self._seen = np.zeros(rows, dtype=np.bool_)
        self._drawn = 0
        self._kept: dict[int, int] = {}

    def rows(self, start: int, stop: int) -> RowNumbers:
        """Raises `InvalidArgumentError` for an order that is no permutation of the rows."""
        while self._drawn < stop:
            row = self._next()
            if self._drawn >= start:  # what lies before was finished before the epoch was resumed
                self._kept[self._drawn] = row
            self._drawn += 1
            if self._drawn == self._number and next(self._draw, None) is not None:
                raise self._wrong(f"more than the dataset's {self._number} rows")
        return np.array([self._kept[position] for position in range(start, stop)], dtype=np.int64)

    def forget(self, start: int, stop: int) -> None:
        for position in range(start, stop):
            self._kept.pop(position, None)

    def _next(self) -> int:
        row = next(self._draw, None)
        if row is None:
            raise self._wrong(f"{self._drawn} of the dataset's {self._number} rows")
        row = int(row)
        if not 0 <= row < self._number:
            raise self._wrong(f"row {row}, and the dataset has rows 0 to {self._number - 1}")
        if self._seen[row]:
            raise self._wrong(f"row {row} twice")
        self._seen[row] = True
        return row

    def _wrong(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the order given as `shuffle` has {what} in epoch {self._epoch}; it must name every row once."
        )


_ROUNDS = 8
_BLOCK = 4096
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(_FIRST)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(_SECOND)
    mixed: npt.NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed


def _mix_number(number: int) -> int:
    number = (number + _GOLDEN) & _MASK
    number = ((number ^ number >> 30) * _FIRST) & _MASK
    number = ((number ^ number >> 27) * _SECOND) & _MASK
    return number ^ number >> 31
