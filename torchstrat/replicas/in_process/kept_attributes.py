"""What replicas of one process have left in plain attributes, each its own, from run to run.

A recurrent state, a memory of past activations, a list that fills: between processes each replica finds what its own
last step left there. In one process the object has the first replica's, which code outside of runs sees and changes.
So the others' are kept here, and are theirs again as long as the first one's is as the run left it; what was set or
changed since is for all. (An edit through ``.data`` is not noticed: it leaves no trace.)
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torchstrat.replicas.entries import reference_of_entry
from torchstrat.replicas.state import SEQUENCES, is_container, trace

_NOTHING = object()
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
_Attributes = dict[str, Any]


@dataclass(frozen=True)
class _Left:
    """What a run has left in one object."""

    reference: weakref.ref[Any]
    leader: int
    """Whose attributes the object has."""
    lasting: dict[str, tuple[Any, Any]]
    """The leader's values of the names below, and what they were then (`trace`)."""
    own: dict[int, _Attributes]
    """Of the other replicas, where theirs is not the leader's."""


class KeptAttributes:
    """Of all modules of a strategy, or its optimizers and the like, between one run and the next."""

    def __init__(self) -> None:
        self._left: dict[int, _Left] = {}  # by the id of the object
        self._warned: set[tuple[type, str]] = set()

    def keep(self, owner: Any, leader: int, others: Iterable[tuple[int, _Attributes]]) -> None:
        """A run ends, and ``owner`` has the leader's attributes. ``others``: of the other replicas that took part."""
        lasting, own = vars(owner), {}
        for replica, attributes in others:
            names = [name for name, value in attributes.items() if value is not lasting.get(name, _NOTHING)]
            if names:
                found = {
                    name: attributes[name]
                    for name in names
                    if name != "training" and not _is_equal(attributes[name], lasting.get(name, _NOTHING))
                }
                if found:
                    own[replica] = found
        if own:
            self.put(owner, leader, own)

    def take(self, owner: Any, leader: int) -> dict[int, _Attributes]:
        """A run begins: what is still each replica's own. It is kept no longer."""
        found = self.peek(owner, leader) if self._left else {}
        self._left.pop(id(owner), None)
        return found

    def put(self, owner: Any, leader: int, own: dict[int, _Attributes]) -> None:
        """Replicas have these, and what ``owner`` has is the leader's."""
        names = {name: vars(owner).get(name, _NOTHING) for found in own.values() for name in found}
        lasting = {name: (value, trace(value)) for name, value in names.items()}
        self._left[id(owner)] = _Left(reference_of_entry(owner, self._left), leader, lasting, own)

    def peek(self, owner: Any, leader: int) -> dict[int, _Attributes]:
        """What is still each replica's own."""
        left = self._left.get(id(owner))
        if left is None or left.reference() is not owner or left.leader != leader:
            return {}
        stale = set()
        for name, (before, then) in left.lasting.items():
            now = vars(owner).get(name, _NOTHING)
            if now is not before or trace(now) != then:
                stale.add(name)
                self._look_at(owner, name, before, now)
        return {
            replica: {name: value for name, value in own.items() if name not in stale}
            for replica, own in left.own.items()
        }

    def _look_at(self, owner: Any, name: str, before: Any, now: Any) -> None:
        """``model.state = model.state.detach()`` between runs is meant for every replica's, and sees the first's."""
        if _memory(now) is None or _memory(before) != _memory(now) or (type(owner), name) in self._warned:
            return
        self._warned.add((type(owner), name))
        warnings.warn(
            f"{type(owner).__name__}.{name} differs between replicas, and code outside of Strategy.run has set it to "
            "another view of the first replica's, which every replica has now. Do this within the step, where each "
            "replica sees its own.",
            stacklevel=7,
        )


def _is_equal(value: Any, other: Any) -> bool:
    """Of what one replica has left and another: whether they are the same, or containers and plain values alike."""
    kind = type(value)
    if value is other:
        return True
    if kind is not type(other):
        return False
    if kind is torch.Tensor:
        are_comparable = (value.device, value.dtype) == (other.device, other.dtype)
        return are_comparable and not (value.requires_grad or other.requires_grad) and torch.equal(value, other)
    if not (kind is tuple or is_container(kind)):
        return kind in _PLAIN and bool(value == other)
    if issubclass(kind, SEQUENCES):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    if issubclass(kind, dict):
        return value.keys() == other.keys() and all(_is_equal(value[key], other[key]) for key in value)
    return bool(value == other)


def _memory(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta:
        return None
    return value.untyped_storage().data_ptr()
