"""Values that are what they are in every process: numbers, strings, and small containers of such.

They need neither a look at what is captured nor cloudpickle, which is most of what a small value would cost. And what
is in other values that hold settings: whether these were changed in place.
"""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import enum
import functools
import itertools
import logging
import pathlib
import pickle
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchstrat.core._torch_private import version_of
from torchstrat.parameter_server.serialization.closure_walk import is_own

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
    try:
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _are_equal_tensors(one, other)
        return one is other or bool(one == other)
    except Exception:  # objects of the user's own
        return False


def _are_equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is torch.strided or other.layout is not one.layout or one.shape != other.shape:
        return one.layout is other.layout and torch.equal(one, other)
    first, second = (tensor.detach().to_sparse_coo().coalesce() for tensor in (one, other))  # `equal` knows none
    return torch.equal(first.indices(), second.indices()) and torch.equal(first.values(), second.values())


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


# -- what is in a value ------------------------------------------------------------------------------------------------
#
# Settings lie in lists and dictionaries, in subclasses of these, in records (data classes, namespaces, with slots or
# without, OmegaConf's) and in records of such. They are looked at up to a size, in every call of `schedule`, without
# keeping a copy.

ALONE = (nn.Module, Optimizer, torch.Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
"""Which of these it is matters, and not what is in it: others tell of that."""

_THEMSELVES = (
    *(*ALONE, LRScheduler, ReduceLROnPlateau, GradScaler),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, enum.Enum, logging.Filterer),
    *(types.MethodType, types.GenericAlias, types.UnionType, type(typing.Any), type(typing.Optional[int])),  # noqa: UP045
)
_BY_WORDS = (np.generic, pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, range, slice)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)  # past what subclasses make of them
_BYTES = (bytearray, array.array)
_MOST_PARTS, _MOST_IN_ALL, _MOST_BYTES = 100, 1000, 4096


def contents_of(value: object) -> object:
    """Other ones when a container, a tensor or a record of settings was changed in place; None of what is something
    else, or has parts that are (a lock, a generator)."""
    kind = type(value)
    parts: list[object] = []
    read = _reader_of(kind)
    return parts if read not in (_itself, _words) and read(value, parts, {}) else None


_Seen = dict[int, object]
"""By id. Temporaries must outlive the look, or others could get their ids."""

_Reader = Callable[[Any, list[object], _Seen], bool]
"""Puts what is in a value behind the parts of others; whether all of it can be told."""


def _read_parts(parts: list[object], found: list[object], seen: _Seen) -> bool:
    if are_atoms(map(type, parts)):
        found += parts
        return True
    for part in parts:
        if is_fixed(part):
            found.append(part)
        elif id(part) not in seen and len(found) < _MOST_IN_ALL:
            seen[id(part)] = part
            if not _reader_of(type(part))(part, found, seen):
                return False
    return True


def _itself(value: object, found: list[object], seen: _Seen) -> bool:
    found.append(id(value))
    return True


def _words(value: object, found: list[object], seen: _Seen) -> bool:
    found.append(repr(value))
    return True


def _tensor(value: torch.Tensor, found: list[object], seen: _Seen) -> bool:
    found.append(None if value.is_inference() else version_of(value))
    return not value.is_inference()


def _array(value: npt.NDArray[np.generic], found: list[object], seen: _Seen) -> bool:
    if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
        found.append(value.tobytes())
    return True


def _bytes(value: bytearray, found: list[object], seen: _Seen) -> bool:
    found += (len(value), bytes(value[:_MOST_BYTES]))
    return True


def _untold(_: object, __: list[object], ___: _Seen) -> bool:
    return False


def _dictionary(value: dict[object, object], found: list[object], seen: _Seen) -> bool:
    found.append(dict.__len__(value))
    keys, values = dict.__iter__(value), dict.values(value)
    return _read_parts([*itertools.islice(keys, _MOST_PARTS), *itertools.islice(values, _MOST_PARTS)], found, seen)


def _sequence(base: type[Collection[object]], value: Collection[object], found: list[object], seen: _Seen) -> bool:
    found.append(base.__len__(value))
    return _read_parts([*itertools.islice(base.__iter__(value), _MOST_PARTS)], found, seen)


def _record(value: object, found: list[object], seen: _Seen) -> bool:
    members = value.__dict__
    return type(members) is dict and _read_parts([*members, *members.values()], found, seen)


def _library_record(value: object, found: list[object], seen: _Seen) -> bool:
    """Without what reading makes there."""
    members = [item for item in value.__dict__.items() if "cache" not in item[0]]
    return _read_parts([*itertools.chain.from_iterable(members)], found, seen)


def _slotted(slots: tuple[types.MemberDescriptorType, ...], value: object, found: list[object], seen: _Seen) -> bool:
    parts: list[object] = []
    for slot in slots:
        with contextlib.suppress(AttributeError):  # it has no value
            parts.append(slot.__get__(value))
    found.append(len(parts))
    return _read_parts(parts, found, seen)


def _all_of(readers: tuple[_Reader, ...], value: object, found: list[object], seen: _Seen) -> bool:
    return all(read(value, found, seen) for read in readers)


_BUILTIN: dict[type, _Reader] = {
    **{base: functools.partial(_sequence, base) for base in _SEQUENCES},
    **dict.fromkeys(_BYTES, _bytes),
    dict: _dictionary,
    torch.Tensor: _tensor,
    np.ndarray: _array,
}
_others: MutableMapping[type, _Reader] = weakref.WeakKeyDictionary()


def _reader_of(kind: type) -> _Reader:
    read = _BUILTIN.get(kind) or _others.get(kind)
    if read is None:
        read = _others[kind] = _new_reader(kind)
    return read


def _new_reader(kind: type) -> _Reader:
    if issubclass(kind, _THEMSELVES):
        return _itself
    if issubclass(kind, _BY_WORDS):
        return _words
    readers = [read for base, read in _BUILTIN.items() if issubclass(kind, base)]
    if kind.__dictoffset__:
        readers.append(_record if is_own(kind.__module__) else _library_record)
    members = (one for base in kind.__mro__ if "__slots__" in vars(base) for one in vars(base).values())
    slots = tuple(one for one in members if isinstance(one, types.MemberDescriptorType))
    if slots:
        readers.append(functools.partial(_slotted, slots))
    if len(readers) > 1:
        return functools.partial(_all_of, tuple(readers))
    return readers[0] if readers else _untold
