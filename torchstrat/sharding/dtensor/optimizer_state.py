"""Whole values of what is cut: what an optimizer keeps, and copies that the program has from ``state_dict()``.

An entry of ``optimizer.state`` stands for the whole. The program reads and edits it like a variable in a step, and
outside of runs as well, where all logical devices of a replica make the same calls, as they do for ``state_dict()``. An
optimizer's own step has the pieces (`as_pieces`), and so has the engine (`torchstrat.core.tensor_classes.memory_of`).

What ``state_dict()`` gives, or ``load_state_dict()`` gets, steps change on one device, and here it is a copy. What a
program writes to it is written to what it is a copy of. Where it loads one of them again it gets what one device would
have there by then, and not what there was. A ``copy.deepcopy`` of them is a copy everywhere.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch

from torchstrat.core import nest
from torchstrat.core._torch_private import (
    DisableTorchFunctionSubclass,
    base_of,
    share_storage,
    tensors_in_storage,
    version_of,
)
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.tensor_classes import asking_class, getter, has_memory, memory_of
from torchstrat.sharding.dtensor.cut_tensors import CutTensor, cut_tensor, enter, local_of, shape_of
from torchstrat.sharding.dtensor.devices import Cut, LogicalDevices
from torchstrat.sharding.dtensor.operators.data_attribute import require_own_memory, take_own_memory


class _Known(Protocol):
    """How a variable is cut."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def cut(self) -> Cut: ...


class _Variables(Protocol):
    """Those of a strategy: `torchstrat.sharding.dtensor.parameters.CutVariables`, which uses this module."""

    def cut_in(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]: ...
    def find(self, tensor: torch.Tensor) -> _Known | None: ...


class StateEntry(CutTensor):
    """Made by `entry_of` only."""

    def __deepcopy__(self, memo: object) -> StateEntry:
        return entry_of(local_of(self).clone(), self.cut, self.devices)


has_memory(CutTensor, local_of)
has_memory(StateEntry, local_of)


def entry_of(piece: torch.Tensor, cut: Cut, devices: LogicalDevices) -> StateEntry:
    """``piece`` as this process's piece of an entry."""
    made = cut_tensor(piece, cut, devices, StateEntry)
    made.is_value = True
    return made


def cut_entry(value: torch.Tensor, cut: Cut, devices: LogicalDevices, dtype: torch.dtype | None = None) -> StateEntry:
    """An entry of the values of ``value``, whole or cut in whatever way, in memory of its own."""
    with torch.no_grad():
        piece = enter(value.detach(), devices, cut, ())
        return entry_of(piece.to(devices.device, dtype, copy=True).contiguous(), cut, devices)


def take_states(optimizer: torch.optim.Optimizer, variables: _Variables, devices: LogicalDevices) -> None:
    """Before a step: what the program has put in the place of entries is cut like these.

    Raises `UnsupportedError` where it still has that under another name: the step would change it in pieces.
    """
    for variable, entries in _entries(optimizer, variables):
        known = variables.find(variable)
        assert known is not None
        for name in [name for name, value in entries.items() if has_dims(value)]:
            if isinstance(entries[name], StateEntry) and entries[name].cut == known.cut:
                if entries[name].lender is not None:
                    require_own_memory([entries[name]], f"{type(optimizer).__name__}.step() would step the state of")
                    take_own_memory([entries[name]])
                continue
            shape = tuple(shape_of(entries[name]))
            if shape == known.shape:
                _take(entries, name, known.cut, devices)
            elif shape == devices.axes.piece_shape(known.shape, known.cut):
                raise UnsupportedError(
                    f"optimizer.state has {name!r} of shape {shape} for a parameter of shape {known.shape} that is cut "
                    "over logical devices. An entry is whole there, as the parameter is: give it the parameter's shape."
                )


def _take(entries: dict[Any, Any], name: object, cut: Cut, devices: LogicalDevices) -> None:
    value = entries[name]
    with DisableTorchFunctionSubclass():
        memory = memory_of(value)
        base = base_of(memory)
        is_shared = tensors_in_storage(memory) > 1 + (base is not None)
    others = [weakref.ref(one) for one in (value, base) if one is not None]
    entries[name] = cut_entry(value, cut, devices)
    del value, memory, base
    if is_shared or any(one() is not None for one in others):
        raise UnsupportedError(
            f"optimizer.state was given a tensor as {name!r} of a parameter that is cut over logical devices, and the "
            "program still has that tensor under another name: a step would change it on each process in another "
            "place. Copy its values instead, entry.copy_(tensor), or put tensor.clone() there."
        )


@contextmanager
def as_pieces(optimizer: torch.optim.Optimizer, variables: _Variables, devices: LogicalDevices) -> Iterator[None]:
    """In this block entries are this process's pieces, for the optimizer to step; what it makes of them is an entry
    behind it."""
    stand_for: dict[int, StateEntry] = {}
    for _, entries in _entries(optimizer, variables):
        for name, value in entries.items():
            if isinstance(value, StateEntry):
                entries[name] = piece = local_of(value)
                stand_for[id(piece)] = value
    try:
        yield
    finally:
        for variable, entries in _entries(optimizer, variables):
            known = variables.find(variable)
            assert known is not None
            for name, value in entries.items():
                if id(value) in stand_for:
                    entries[name] = stand_for[id(value)]
                elif type(value) is StateEntry or not has_dims(value):
                    continue
                elif tuple(value.shape) == devices.axes.piece_shape(known.shape, known.cut):
                    entries[name] = entry_of(value, known.cut, devices)


def has_dims(value: object) -> bool:
    """False for a count of steps, of which every parameter has one."""
    return isinstance(value, torch.Tensor) and (type(value) is StateEntry or value.ndim > 0)


def _entries(optimizer: torch.optim.Optimizer, variables: _Variables) -> Iterator[tuple[torch.Tensor, dict[Any, Any]]]:
    for variable in variables.cut_in(optimizer):
        entries = optimizer.state.get(variable)
        if isinstance(entries, dict):
            yield variable, entries


class _Asking:
    """Mixed into the class of a copy: who reads it once steps have changed what it is a copy of is told."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[object] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        is_write = name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))
        is_read = func == _DATA or not (is_write or name == "__get__" or name in _FACTS)
        asked = [one for one in nest.flatten([args, kwargs or {}]) if isinstance(one, _Asking)]
        for one in asked if is_read else ():
            _look_at(one)
        with DisableTorchFunctionSubclass():
            # ``.data`` would count versions for itself, and what is written to it would not be noticed.
            made = func(*args, **kwargs or {}) if func != _DATA else cast(torch.Tensor, args[0]).detach()
            for one in asked:
                vars(one)[_COPIES].used(one, made)
            return made

    def _plain(self) -> torch.Tensor:
        _look_at(self)
        with DisableTorchFunctionSubclass():
            return cast(torch.Tensor, self).detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._plain().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> Any:
        return self._plain().__reduce_ex__(protocol)


def _look_at(value: object) -> None:
    if isinstance(value, _Asking):
        copies: WholeCopies = vars(value)[_COPIES]
        copies.warn_of_reader(value)


_COPIES = "_torchstrat_copies"
_DATA = getter("data")
_FACTS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point"),
        *("is_complex", "is_contiguous", "storage_offset", "__len__", "__hash__", "get_device", "type", "__repr__"),
        *(f"{made}_like" for made in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")),
        *(f"new_{made}" for made in ("empty", "empty_strided", "full", "ones", "zeros")),
    }
)
"""What reads no values, by name, and what debuggers call. Of what is written `WholeCopies.current` knows."""


class _Copy(NamedTuple):
    whole: weakref.ref[torch.Tensor]
    version: int
    source: Callable[[], CutTensor]
    source_version: int


class WholeCopies:
    """Of the variables of one strategy, and of what optimizers keep of them."""

    def __init__(self) -> None:
        self._known: dict[int, _Copy] = {}
        self._viewed: set[int] = set()  # by ``id``: those of which the program has had views, and may write to these
        self._has_warned = False

    def note(self, whole: torch.Tensor, source: Callable[[], CutTensor]) -> None:
        """``whole`` has the values of what ``source()`` gives, and would be it on one device. A tensor of
        `torch.inference_mode` could not be: no step may change one."""
        with DisableTorchFunctionSubclass():
            if whole.is_inference():
                return
        key = id(whole)

        def forget(reference: object) -> None:
            if key in self._known and self._known[key].whole is reference:
                del self._known[key]
                self._viewed.discard(key)

        version = version_of(local_of(source()))
        self._known[key] = _Copy(weakref.ref(whole, forget), version_of(whole), source, version)
        if type(whole) is torch.Tensor:
            vars(whole)[_COPIES] = self
            whole.__class__ = asking_class(_Asking, torch.Tensor)

    def has(self, value: torch.Tensor) -> bool:
        """Whether it is one of these."""
        return self._copy_of(value) is not None

    def _copy_of(self, value: object) -> _Copy | None:
        """What is known of ``value``, where it is one of these."""
        known = self._known.get(id(value))
        return known if known is not None and known.whole() is value else None

    def warn_of_reader(self, value: object) -> None:
        """Once: ``value`` is read, and steps have changed what it is a copy of."""
        known = self._copy_of(value)
        if self._has_warned or known is None:
            return
        source = known.source()
        if version_of(local_of(source)) == known.source_version:
            return
        self._has_warned = True
        warnings.warn(
            f"a tensor of shape {tuple(shape_of(source))} that state_dict() has returned, or load_state_dict was given,"
            " for a parameter that is cut over logical devices is read after steps have changed that. It is a copy of "
            "what there was then; on one device it shows what there is now. Call state_dict() again, or take a "
            "copy.deepcopy where the values of then are meant.",
            stacklevel=4,
        )

    def used(self, value: torch.Tensor, made: object) -> None:
        """A function has had ``value``, and ``made`` this, which may be a view of it, or an array."""
        known = self._copy_of(value)
        if known is None:
            return
        for one in nest.flatten([made]):
            if isinstance(one, np.ndarray):
                one.flags.writeable = False  # what is written there, nobody would notice
            elif isinstance(one, torch.Tensor) and one is not value and share_storage(one, value):
                self._viewed.add(id(value))
        if version_of(value) != known.version:
            self.current(value)

    def settle(self) -> None:
        """What the program has written to views of copies since is written to what they are copies of."""
        for key in tuple(self._viewed):
            value = self._known[key].whole()
            with DisableTorchFunctionSubclass():
                if value is not None and version_of(value) != self._known[key].version:
                    self.current(value)

    def current(self, value: torch.Tensor) -> torch.Tensor:
        """What ``value`` would be by now: itself, where it is no copy. What the program has written to it is so there,
        too.

        Raises `UnsupportedError` where steps have changed it as well.
        """
        known = self._copy_of(value)
        if known is None:
            return value
        source = known.source()
        with DisableTorchFunctionSubclass():
            version = version_of(value)
        if version != known.version:
            piece = local_of(source)
            if version_of(piece) != known.source_version:
                raise UnsupportedError(
                    "the program has written to a tensor that state_dict() has returned, or load_state_dict was given, "
                    "for a parameter that is cut over logical devices, and steps have changed the parameter since. On "
                    "one device it is one tensor, which both change. Write to what state_dict() returns now, or, where "
                    "the values of then are meant, to a copy.deepcopy."
                )
            with torch.no_grad(), DisableTorchFunctionSubclass():
                piece.copy_(source.devices.own_piece(value.detach(), source.cut))
            self.note(value, known.source)
        return source
