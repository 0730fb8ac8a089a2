"""Counts that a step keeps in an object of the program's own (``trainer.steps += 1``), and who counts along.

Replicas of one process share such an object, so each of them counts; a rank without rows does not run the step, and
does not count. Nothing tells a count of steps, of which one device has one, from a sum over rows, of which replicas of
one process make the right one: so the numbers stay what the code makes of them, and the warning says where one went up
by exactly one for each replica.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

_MOST_OBJECTS = 64
"""Of a step's: the nearest ones. Further away lie data."""


class StepCounts:
    """Of one strategy, in one run after the other."""

    def __init__(self) -> None:
        self._before: list[tuple[weakref.ref[Any], dict[str, int]]] = []
        self._told: set[str] = set()

    def begin(self, objects: Sequence[weakref.ref[Any]]) -> None:
        """A run begins, whose step reaches these."""
        self._before = []
        for reference in objects[:_MOST_OBJECTS]:
            numbers = {
                name: value for name, value in getattr(reference(), "__dict__", {}).items() if type(value) is int
            }
            if numbers:
                self._before.append((reference, numbers))

    def grown_by(self, number: int) -> list[str]:
        """The run has ended: what has grown by exactly ``number``, as ``Class.attribute``."""
        before, self._before = self._before, []
        return [
            f"{type(one).__name__}.{name}"
            for reference, numbers in before
            if (one := reference()) is not None
            for name, value in numbers.items()
            if vars(one).get(name) == value + number
        ]

    def warn_of_shared(self, replicas: int) -> None:
        """The run has ended, of so many replicas in this process."""
        self._warn(
            self.grown_by(replicas),
            f"has grown by {replicas} in one run: the {replicas} replicas of this process share the object, and each "
            "has added 1, where a step on one device adds 1.",
        )

    def warn_of_missed(self, names: Iterable[str]) -> None:
        """The run has ended, and the step, which this process did not run, has added 1 to these elsewhere."""
        self._warn(
            names,
            "has grown by 1 in a run in which this process had no rows: it did not run the step, and its object is "
            "as it was.",
        )

    def _warn(self, names: Iterable[str], what: str) -> None:
        for name in names:
            if name not in self._told:
                self._told.add(name)
                warnings.warn(
                    f"{name} {what} If it counts steps, count outside of Strategy.run, or keep it as an attribute or a "
                    "buffer of a module, or as a ts.Variable.",
                    stacklevel=6,
                )
