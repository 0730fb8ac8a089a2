"""What every place of the variables should hold, from what the program was told and did: no processes, no torch.

A function adds 1 at its own place, at every tenth one in two pushes. What is lost, and what is there twice, can so be
counted, also after a restore, and after a coordinator that died.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[Any]
TWICE_EVERY = 10
KEPT = 12
"""Checkpoints of which it is known what they hold: more than the manager keeps."""


def pushes_of(place: int) -> int:
    return 2 if place % TWICE_EVERY == TWICE_EVERY - 1 else 1


@dataclass(frozen=True)
class Deviations:
    """Over all places of all variables, in additions."""

    lost: int = 0
    duplicated: int = 0
    stray: int = 0

    def __add__(self, other: Deviations) -> Deviations:
        return Deviations(self.lost + other.lost, self.duplicated + other.duplicated, self.stray + other.stray)


@dataclass(frozen=True)
class State:
    """What there should be at one moment.

    Args:
        held: additions that are certainly there, (variables or 1, places).
        open: places of functions that were scheduled and are not known to have ended.
        side: additions to the other variable, which the functions of the places leave alone; None: not known.
        whole: the functions of open places have either run or not, as a checkpoint promises; none is half-way.
    """

    held: Counts
    open: frozenset[int] = frozenset()
    side: int | None = 0
    whole: bool = False


class Ledger:
    """Follows the program. Deviations and problems are counted where they are first seen."""

    def __init__(self, size: int) -> None:
        self.now: State | None = State(np.zeros((1, size)))
        """None: a restore has begun, or a server was lost, and nothing is known until the end of the next restore."""
        self.deviations = Deviations()
        self.problems: list[str] = []
        self.functions = self.saves = self.restores = self.left_behind = 0
        self._saved: dict[int, State] = {}
        self._newest: int | None = None

    # -- what the program does --------------------------------------------------------------------------------------

    def scheduled(self, place: int) -> None:
        self.functions += 1
        if self.now is None:
            return
        # One whose function a lost server has cancelled may come again, in the call that then takes all back.
        if self.now.held[:, place].any():
            self.problems.append(f"place {place} was handed out again, and its function had ended")
        self.now = replace(self.now, open=self.now.open | {place})

    def ended(self, places: Sequence[int]) -> None:
        """These functions have returned."""
        if self.now is None:
            return
        if strangers := set(places) - self.now.open:
            self.problems.append(f"results of functions that nobody had scheduled: places {sorted(strangers)}")
        held = self.now.held.copy()
        for place in places:
            held[:, place] = pushes_of(place)
        self.now = replace(self.now, held=held, open=self.now.open - set(places))

    def side_begins(self) -> None:
        """Functions for the other variable are scheduled, or it is restored alone."""
        if self.now is not None:
            self.now = replace(self.now, side=None)

    def side_went_back(self, step: int, more: int) -> None:
        """It was restored alone, and ``more`` functions have added to it since."""
        if self.now is not None:
            saved = self._saved[step].side
            self.now = replace(self.now, side=None if saved is None else saved + more)

    def saving(self, step: int) -> None:
        """What a checkpoint that is begun now may hold."""
        if self.now is not None:
            self._saved[step] = replace(self.now, whole=True)
        for old in sorted(self._saved)[:-KEPT]:
            if old != self._newest:
                del self._saved[old]

    def saved(self, step: int) -> None:
        """It is in place: a later restore goes back to it, or to a later one."""
        self._newest = step
        self.saves += 1

    def restoring(self) -> None:
        self.now = None

    def restored(self, step: int) -> None:
        self.restores += 1
        if self._newest is not None and step < self._newest:
            self.problems.append(f"went back to step {step}, and the checkpoint of step {self._newest} was in place")
        if step not in self._saved:
            self.problems.append(f"went back to step {step}, which nobody has saved")
        self.now = self._saved.get(step)

    # -- what is there ----------------------------------------------------------------------------------------------

    def look(self, values: Sequence[Counts], side: float, finished: int | None) -> Deviations:
        """Compare, and go on from what is there: a deviation counts once.

        Args:
            values: of each variable.
            finished: rows that the leased dataset says are finished; None: it does not know, as at the start.
        """
        if self.now is None:
            return Deviations()
        now = self.now
        found = judge(now, values)
        if now.side is not None and side != now.side:
            found += Deviations(lost=max(int(now.side - side), 0), duplicated=max(int(side - now.side), 0))
        self.deviations += found
        self.left_behind += finished is None
        if finished is not None:
            held = np.stack(values).astype(np.float64)
            self.now = State(held, frozenset() if now.whole else now.open, int(side))
            if found == Deviations() and finished != (filled := np.count_nonzero(held.any(0))):
                self.problems.append(f"the dataset has {finished} finished rows, and {filled} places are filled")
        return found


def judge(state: State, values: Sequence[Counts]) -> Deviations:
    """Of the variables' values from what there should be.

    A place whose function may have run or not holds any part of its additions; where none can be half-way, none or all
    of them, in all variables alike.
    """
    found, places = np.stack(values), np.arange(state.held.shape[1])
    is_open = np.isin(places, list(state.open))
    most = np.where(is_open, np.where(places % TWICE_EVERY == TWICE_EVERY - 1, 2, 1), state.held)
    least = np.where(is_open & ~(state.whole & found.any(0)), 0, most)
    over, under = np.maximum(found - most, 0), np.maximum(least - found, 0)
    belongs = np.broadcast_to(most > 0, over.shape)
    return Deviations(int(np.ceil(under).sum()), int(np.ceil(over[belongs]).sum()), int(np.ceil(over[~belongs]).sum()))
