"""Values that are what they are in every process: numbers, strings, and small containers of such.

They need neither a look at what is captured nor cloudpickle, which is most of what a small value would cost.
"""

from __future__ import annotations

import functools
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Exact types: subclasses may have a way of their own to be pickled."""

_DEPTH = 4
_CLOUDPICKLE = b"cloudpickle"  # the module of what makes functions and classes that travel by value

are_atoms: Callable[[Iterable[type]], bool] = ATOMS.issuperset
"""Whether all of some types are atoms."""


def is_fixed(value: object) -> bool:
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


def dumps(value: object) -> bytes:
    """A plain value, pickled as `ObjectPickler` would."""
    return pickle.dumps(value, protocol=5)


LEAST_ADDRESS = 2**32
"""No object that a program has made lies below: what `id` gives is above."""

_INTEGERS_ABOVE = re.compile(rb"\x8a[\x05-\x08]")  # of pickle's opcodes: a number of so many bytes


def may_hold_addresses(blob: bytes) -> bool:
    """Whether a pickle may have integers in it that are as large as what `id` gives."""
    return _INTEGERS_ABOVE.search(blob) is not None


def holds_no_class_of_a_program(blob: bytes) -> bool:
    """Whether a pickle without references surely needs nothing of cloudpickle to be undone."""
    return _CLOUDPICKLE not in blob


def are_equal(one: object, other: object) -> bool:
    """Whether two settings, such as hyperparameters, are the same; tensors by value. What cannot be compared is not."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    try:
        return one is other or bool(one == other)
    except Exception:  # objects of the user's own
        return False


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """The values as they are now: contiguous, on the CPU, without history, of no shared storage."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.device.type != "cpu":
            return plain.cpu().contiguous()
        return plain.clone(memory_format=torch.contiguous_format)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values lie in one block of memory, as most do."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )


def in_parts(error: BaseException) -> tuple[type[BaseException], tuple[object, ...], object]:
    """What an exception of a class of the user's own, with arguments of its own, can be made of again without calling
    it: its class, its arguments and its attributes. How the class itself says that it is pickled does not count."""
    kind = type(error)
    reduced: Any = (
        _builtin_of(kind).__reduce__(error) if pickles_itself(kind) else error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    )
    return kind, reduced[1], reduced[2] if len(reduced) > 2 else None


def from_parts(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    """Without its attributes, which its ``__setstate__`` takes."""
    error = kind.__new__(kind, *args)
    _builtin_of(kind).__init__(error, *args)  # for those that keep their arguments in C: the user's takes others
    return error


def pickles_itself(kind: type[BaseException]) -> bool:
    """Whether it says how it is pickled."""
    return any(isinstance(way, types.FunctionType) for way in (kind.__reduce__, kind.__reduce_ex__))


def _builtin_of(kind: type[BaseException]) -> type[BaseException]:
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


class ClassesHere(pickle.Unpickler):
    """A class of the user's program that is known here stays as it is here.

    cloudpickle would find the same class, and then replace its methods by the copies that travelled, whose closures and
    globals are others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._at_home: set[type] = set()

    def find_class(self, module_name: str, name: str) -> object:
        found = super().find_class(module_name, name)
        if module_name == "cloudpickle.cloudpickle":
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return functools.partial(self._make_class, found)
            if name == "_class_setstate":
                return functools.partial(self._set_state, found)
        return found

    def _make_class(self, make: Callable[..., type], *args: object) -> type:
        *_, tracker_id, _ = args
        own: type | None = sys.modules["cloudpickle.cloudpickle"]._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)  # noqa: SLF001
        if own is None:
            return make(*args)
        self._at_home.add(own)
        return own

    def _set_state(self, set_state: Callable[[type, object], type], made: type, state: object) -> type:
        return made if made in self._at_home else set_state(made, state)
