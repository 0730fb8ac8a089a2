"""Where each row of one epoch is: to be handed out, in a lease, or finished; and in which order they are handed out.

No threads, no processes, no clock. Rows are known by their *positions* in the epoch's order, 0 to ``rows - 1``. Sets of
them are intervals: what is finished is all below a watermark but for the few rows that functions are busy with.

An order is position → number of the row in the dataset. A shuffled one is computed, not stored: `ShuffledOrder` is a
permutation keyed by seed and epoch, of which any part costs the same at any time. So an epoch of a billion rows begins
at once, is resumed anywhere, and takes no memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchstrat.core.errors import InvalidArgumentError

Interval = tuple[int, int]
"""``[start, stop)``, not empty."""


class Intervals:
    """A set of whole numbers, kept as disjoint intervals in ascending order, of which no two adjoin.

    Adding and removing take time in proportion to the number of intervals, as a list's insertion does; for rows that
    end out of order that is how many functions run at once.
    """

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        for start, stop in intervals:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Interval]:
        return iter(zip(self.starts, self.stops, strict=True))

    def __len__(self) -> int:
        """How many numbers."""
        return sum(self.stops) - sum(self.starts)

    def __bool__(self) -> bool:
        return bool(self.starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Intervals({list(self)})"

    def copy(self) -> Intervals:
        copy = Intervals()
        copy.starts, copy.stops = self.starts.copy(), self.stops.copy()
        return copy

    def add(self, start: int, stop: int) -> None:
        """Put ``[start, stop)`` in; what is in already stays."""
        if start >= stop:
            return
        first = bisect_left(self.stops, start)  # the first that ends where this begins, or later
        last = first
        while last < len(self.starts) and self.starts[last] <= stop:
            start, stop = min(start, self.starts[last]), max(stop, self.stops[last])
            last += 1
        self.starts[first:last], self.stops[first:last] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take ``[start, stop)`` out; what is not in does not matter."""
        if start >= stop:
            return
        first = bisect_left(self.stops, start + 1)
        last = first
        kept: list[Interval] = []
        while last < len(self.starts) and self.starts[last] < stop:
            own_start, own_stop = self.starts[last], self.stops[last]
            kept += [(own_start, start)] if own_start < start else []
            kept += [(stop, own_stop)] if stop < own_stop else []
            last += 1
        self.starts[first:last] = [one for one, _ in kept]
        self.stops[first:last] = [one for _, one in kept]

    def within(self, start: int, stop: int) -> list[Interval]:
        """What of ``[start, stop)`` is in."""
        found = []
        first = bisect_left(self.stops, start + 1)
        for own_start, own_stop in zip(self.starts[first:], self.stops[first:], strict=True):
            if own_start >= stop:
                break
            found.append((max(own_start, start), min(own_stop, stop)))
        return found

    def take(self, count: int) -> tuple[Interval, ...]:
        """Take the lowest ``count`` numbers out, or all where there are fewer, and return them."""
        taken: list[Interval] = []
        while count > 0 and self.starts:
            start = self.starts[0]
            stop = min(self.stops[0], start + count)
            taken.append((start, stop))
            self.remove(start, stop)
            count -= stop - start
        return tuple(taken)

    def difference(self, *others: Intervals) -> Intervals:
        """What is in this one and in none of the others."""
        left = self.copy()
        for other in others:
            for start, stop in other:
                left.remove(start, stop)
        return left


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
        self._error: InvalidArgumentError | None = None
        self._kept: dict[int, int] = {}

    def rows(self, start: int, stop: int) -> RowNumbers:
        """Raises `InvalidArgumentError` for an order that is no permutation of the rows, from then on each time."""
        if self._error is not None:
            raise self._error
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
        self._error = InvalidArgumentError(
            f"the order given as `shuffle` has {what} in epoch {self._epoch}; it must name every row once."
        )
        return self._error


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


Positions = tuple[Interval, ...]


@dataclass
class _Held:
    """The positions of one lease that has not ended, and whether a function has it."""

    positions: Positions
    scheduled: bool = False


class Epoch:
    """One epoch. A position is in exactly one place: ``left``, a lease that is held, or ``finished``.

    Args:
        number: counted from 0.
        rows: how many positions there are.
        finished, repeated, returned: where an interrupted epoch goes on.
    """

    def __init__(
        self, number: int, rows: int, finished: Iterable[Interval] = (), repeated: int = 0, returned: int = 0
    ) -> None:
        self.number = number
        self.rows = rows
        self.finished = Intervals(finished)
        self.left = Intervals([(0, rows)]).difference(self.finished)
        self.twice = Intervals()
        self.repeated = repeated
        self.returned = returned
        self.handed_out = len(self.finished) + returned
        self._held: dict[int, _Held] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.rows

    @property
    def scheduled(self) -> Intervals:
        """Positions that functions have which have not ended."""
        return Intervals(one for held in self._held.values() if held.scheduled for one in held.positions)

    @property
    def lost(self) -> Intervals:
        """Positions that are nowhere else: handed out, and given to no function."""
        return Intervals([(0, self.rows)]).difference(self.finished, self.left, self.scheduled)

    def hand_out(self, lease: int, count: int) -> Positions:
        """Up to ``count`` positions for a new lease, the lowest first, hence those that came back before those that
        are new. Empty when there are none to be handed out at the moment."""
        positions = self.left.take(count)
        if positions:
            self._held[lease] = _Held(positions)
            self.handed_out += size(positions)
        return positions

    def holds(self, lease: int) -> bool:
        """Whether a lease was handed out and has not ended."""
        return lease in self._held

    def schedule(self, lease: int) -> None:
        """A function has the lease now."""
        self._held[lease].scheduled = True

    def unschedule(self, lease: int) -> None:
        """The function was not queued after all."""
        self._held[lease].scheduled = False

    def repeat(self, lease: int) -> None:
        """The function is sent to a worker another time."""
        self.repeated += size(self._held[lease].positions)

    def finish(self, lease: int) -> Positions:
        """The function has returned."""
        positions = self._held.pop(lease).positions
        for start, stop in positions:
            for twice in self.finished.within(start, stop):
                self.twice.add(*twice)
            self.finished.add(start, stop)
        return positions

    def give_back(self, lease: int) -> None:
        """The function raised or was cancelled, or there will be none: the positions are to be handed out again."""
        positions = self._held.pop(lease).positions
        for start, stop in positions:
            self.left.add(start, stop)
        self.returned += size(positions)

    def give_back_unscheduled(self) -> None:
        """Take back every lease that no function has."""
        for lease in [lease for lease, held in self._held.items() if not held.scheduled]:
            self.give_back(lease)


def size(positions: Iterable[Interval]) -> int:
    return sum(stop - start for start, stop in positions)
