"""What optimizers keep of variables that are cut: an entry of ``optimizer.state`` stands for the whole.

The program reads and edits it like a variable in a step, and outside of runs as well, where all logical devices of a
replica make the same calls, as they do for ``state_dict()``. An optimizer's own step has the pieces (`as_pieces`), and
so has the engine (`torchstrat.core.pieces.memory_of`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from torchstrat.core._torch_private import DisableTorchFunctionSubclass, base_of, tensors_in_storage
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.pieces import has_memory, memory_of
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
        for name in [name for name, value in entries.items() if _has_dims(value)]:
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


def _take(entries: dict[Any, Any], name: Any, cut: Cut, devices: LogicalDevices) -> None:
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
                elif type(value) is StateEntry or not _has_dims(value):
                    continue
                elif tuple(value.shape) == devices.axes.piece_shape(known.shape, known.cut):
                    entries[name] = entry_of(value, known.cut, devices)


def _has_dims(value: object) -> bool:
    """False for a count of steps, of which every parameter has one."""
    return isinstance(value, torch.Tensor) and (type(value) is StateEntry or value.ndim > 0)


def _entries(optimizer: torch.optim.Optimizer, variables: _Variables) -> Iterator[tuple[torch.Tensor, dict[Any, Any]]]:
    for variable in variables.cut_in(optimizer):
        entries = optimizer.state.get(variable)
        if isinstance(entries, dict):
            yield variable, entries
