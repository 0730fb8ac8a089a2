"""The order in which a strategy has come to know objects: what gives variables a number, and with it a name, that all
processes of an SPMD program agree on, though each collects what the program has dropped when it likes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, KeysView, Mapping, ValuesView
from typing import Any, NamedTuple

import torch


class WeakOrdered:
    """Objects in order of arrival, compared by identity (tensors and modules define ``==`` otherwise), held weakly."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[object]] = {}
        self._numbers: dict[int, int] = {}
        self.count = 0
        """How many have ever been added."""

    def add(self, value: object) -> bool:
        """Whether ``value`` is new."""
        key = id(value)
        if key in self._references:
            return False
        references, numbers = self._references, self._numbers

        def forget(_: object) -> None:
            references.pop(key, None)
            numbers.pop(key, None)

        self._references[key] = weakref.ref(value, forget)
        self._numbers[key] = self.count
        self.count += 1
        return True

    @property
    def gone(self) -> int:
        """How many of these are there no more."""
        return self.count - len(self._references)

    def discard(self, value: object) -> None:
        self._references.pop(id(value), None)
        self._numbers.pop(id(value), None)

    def number_of(self, value: object) -> int:
        return self._numbers.get(id(value), -1)

    def ids(self) -> KeysView[int]:
        """What `id` gives for each of them."""
        return self._references.keys()

    def numbers(self) -> ValuesView[int]:
        """That each got when it was added."""
        return self._numbers.values()

    def numbered(self) -> Iterator[tuple[int, Any]]:
        """With the number that each got when it was added. Numbers are never used again, so they are equal on all
        processes of an SPMD program, even where one of them has not yet collected an object that another has."""
        for value in self:
            yield self._numbers[id(value)], value

    def __contains__(self, value: object) -> bool:
        return id(value) in self._references

    def __iter__(self) -> Iterator[Any]:
        return iter(self.alive())

    def alive(self) -> list[Any]:
        """Those that are still there."""
        if not self._references:
            return []
        return [value for each in list(self._references.values()) if (value := each()) is not None]


class Place(NamedTuple):
    """Where a variable is found: in the ``number``-th module, say, as its ``position``-th parameter."""

    kind: int
    number: int
    position: int
    name: str


class FirstPlaces:
    """Where each variable was first found. It keeps this place, when the module there is gone and another one has it
    too: a tied weight, the parameters of what was traced by TorchScript. Else its name and its place in the order would
    change when Python collects that module: on each rank at a time of its own."""

    def __init__(self, *holders: WeakOrdered) -> None:
        self._holders = holders  # by kind
        self._first: dict[int, tuple[weakref.ref[torch.Tensor], Place]] = {}
        self._gone = 0
        self._left: dict[int, Place] = {}

    def note(self, tensor: torch.Tensor, place: Place) -> None:
        """``tensor`` is found there, and at no place before it."""
        key, first, left = id(tensor), self._first, self._left

        def forget(_: object) -> None:  # another tensor may come to have its ``id``
            first.pop(key, None)
            left.pop(key, None)

        if (before := first.get(key)) is None:
            first[key] = weakref.ref(tensor, forget), place
        elif before[1] != place:
            first[key] = before[0], place

    def note_new(self, tensor: torch.Tensor, place: Place) -> None:
        """``tensor`` becomes what is found there, perhaps at a place before it too."""
        before = self._first.get(id(tensor))
        if before is None or place < before[1]:
            self.note(tensor, place)

    def left(self) -> Mapping[int, Place]:
        """``id`` → first place of the variables that have lived longer than what was there."""
        gone = sum([holder.gone for holder in self._holders])
        if gone != self._gone:
            self._gone = gone
            alive = [set(holder.numbers()) for holder in self._holders]
            self._left.clear()
            for key, (_, place) in list(self._first.items()):
                if place.number not in alive[place.kind]:
                    self._left[key] = place
        return self._left

    def clear(self) -> None:
        self._first.clear()
        self._left.clear()


def reference_of_entry(owner: object, entries: dict[int, Any]) -> weakref.ref[Any]:
    """For the ``reference`` of an entry that is made for ``owner``, and is dropped from ``entries`` with it. These
    are by `id`: tensors define ``==`` otherwise than by identity."""
    key = id(owner)

    def forget(reference: weakref.ref[object]) -> None:
        if key in entries and entries[key].reference is reference:
            del entries[key]

    return weakref.ref(owner, forget)
