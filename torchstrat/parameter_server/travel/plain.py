"""Values that are what they are in every process: numbers, strings, and small containers of such.

They need neither a look at what is captured nor cloudpickle, which is most of what a small value would cost.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Exact types: subclasses may have a way of their own to be pickled."""

_DEPTH = 4
_CLOUDPICKLE = b"cloudpickle"  # the module of what makes functions and classes that travel by value

are_atoms: Callable[[Iterable[type]], bool] = ATOMS.issuperset
"""Whether all of some types are atoms."""


def is_fixed(value: Any) -> bool:
    """Whether ``value`` is an atom or a tuple of atoms: what cannot change and stay the same object."""
    return type(value) in ATOMS or (type(value) is tuple and are_atoms(map(type, value)))


def is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Whether ``value`` is an atom, or a list, tuple or dict of plain values; not deeper than a few levels."""
    kind = type(value)
    if kind in ATOMS:
        return True
    if depth == 0:
        return False
    if kind is tuple or kind is list:
        return are_atoms(map(type, value)) or all(is_plain(part, depth - 1) for part in value)
    if kind is dict:
        return are_atoms(map(type, value)) and (
            are_atoms(map(type, value.values())) or all(is_plain(part, depth - 1) for part in value.values())
        )
    return False


def dumps(value: Any) -> bytes:
    """A plain value, pickled as `ObjectPickler` would."""
    return pickle.dumps(value, protocol=5)


def holds_no_class_of_a_program(blob: bytes) -> bool:
    """Whether a pickle without references surely needs nothing of cloudpickle to be undone."""
    return _CLOUDPICKLE not in blob


def are_equal(one: Any, other: Any) -> bool:
    """Whether two settings, such as hyperparameters, are the same; tensors by value. What cannot be compared is not."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    try:
        return one is other or bool(one == other)
    except Exception:  # objects of the user's own
        return False
