"""Where each row of one epoch is: to be handed out, in a lease, or finished. No threads, no processes, no clock.

Rows are known by their *positions* in the epoch's order, 0 to ``rows - 1``. Sets of them are intervals: what is
finished is all below a watermark but for the few rows that functions are busy with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchstrat.parameter_server.leases.intervals import Interval, Intervals

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

    def is_scheduled(self, lease: int) -> bool:
        return lease in self._held and self._held[lease].scheduled

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
