"""Sets of whole numbers that are nearly contiguous: a few intervals, however many numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

Interval = tuple[int, int]
"""``[start, stop)``, not empty."""


class Intervals:
    """A set of whole numbers, kept as disjoint intervals in ascending order, of which no two adjoin.

    Adding and removing take time in proportion to the number of intervals, as a list's insertion does; for rows that
    end out of order that is how many functions run at once.
    """

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Interval]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __len__(self) -> int:
        """How many numbers."""
        return sum(self._stops) - sum(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Intervals({list(self)})"

    def copy(self) -> Intervals:
        copy = Intervals()
        copy._starts, copy._stops = self._starts.copy(), self._stops.copy()
        return copy

    def add(self, start: int, stop: int) -> None:
        """Put ``[start, stop)`` in; what is in already stays."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)  # the first that ends where this begins, or later
        last = first
        while last < len(self._starts) and self._starts[last] <= stop:
            start, stop = min(start, self._starts[last]), max(stop, self._stops[last])
            last += 1
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take ``[start, stop)`` out; what is not in does not matter."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start + 1)
        last = first
        kept: list[Interval] = []
        while last < len(self._starts) and self._starts[last] < stop:
            own_start, own_stop = self._starts[last], self._stops[last]
            kept += [(own_start, start)] if own_start < start else []
            kept += [(stop, own_stop)] if stop < own_stop else []
            last += 1
        self._starts[first:last] = [one for one, _ in kept]
        self._stops[first:last] = [one for _, one in kept]

    def within(self, start: int, stop: int) -> list[Interval]:
        """What of ``[start, stop)`` is in."""
        found = []
        first = bisect_left(self._stops, start + 1)
        for own_start, own_stop in zip(self._starts[first:], self._stops[first:], strict=True):
            if own_start >= stop:
                break
            found.append((max(own_start, start), min(own_stop, stop)))
        return found

    def take(self, count: int) -> tuple[Interval, ...]:
        """Take the lowest ``count`` numbers out, or all where there are fewer, and return them."""
        taken: list[Interval] = []
        while count > 0 and self._starts:
            start = self._starts[0]
            stop = min(self._stops[0], start + count)
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
