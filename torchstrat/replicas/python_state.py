"""What a step changes in Python objects that are no state of the strategy: in closures, lists, objects of the program's
own. Replicas of one process share these, so what each does to them is done once for each; a rank without rows does not
run the step, and does nothing.

A sum over rows comes out as on one device that way, a count of steps (``trainer.steps += 1``) or an average does not.
Nobody can tell which was meant, so the numbers stay what the code makes of them, and a warning names what has changed
like that: a whole number that went up by exactly one for each replica, a tensor that several have changed in place.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from torchstrat.core._torch_private import version_of


class StepCounts:
    """Numbers in objects of the program's own, in one run of a strategy after the other."""

    def __init__(self) -> None:
        self._before: list[tuple[weakref.ref[Any], dict[str, int]]] = []
        self._told: set[str] = set()

    def begin(self, objects: Sequence[weakref.ref[Any]]) -> None:
        """A run begins, whose step reaches these."""
        self._before = []
        for reference in objects:
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


class PlainTensors:
    """Tensors, in one run of a strategy after the other."""

    def __init__(self) -> None:
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._changed_by: dict[int, set[int]] = {}
        self._is_told = False

    def begin(self, tensors: Iterable[torch.Tensor], others: Container[int]) -> None:
        """A run begins. ``others``: the ``id`` of tensors that change hands."""
        self._changed_by = {}
        if self._is_told:
            return
        known = [one for one in tensors if id(one) not in others and not one.is_inference()]
        self._versions = [(one, version_of(one)) for one in known]

    def park(self, replica: int) -> None:
        """The turn of ``replica`` ends."""
        for place, (tensor, version) in enumerate(self._versions):
            if version_of(tensor) != version:
                self._versions[place] = tensor, version_of(tensor)
                self._changed_by.setdefault(place, set()).add(replica)

    def end(self) -> None:
        versions, self._versions = self._versions, []
        found = [versions[place][0] for place, replicas in self._changed_by.items() if len(replicas) > 1]
        if not found:
            return
        self._is_told = True
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.warn(
            f"the step changes a tensor of shape {tuple(found[0].shape)}{more} in place, which is in no module: in a "
            "closure, a list or an object of the program's own. The replicas of this process share it, and each has "
            "changed it, one after the other: what adds up has added up over all of them, but an average has moved "
            "once for each. State that all replicas change alike, to be changed once, belongs into a module as a "
            "buffer or a frozen parameter (torch.nn.Parameter(tensor, requires_grad=False)), or is changed outside of "
            "Strategy.run; return from the step what counts rows. Under torchrun each process has such a tensor for "
            "itself.",
            stacklevel=2,
        )
