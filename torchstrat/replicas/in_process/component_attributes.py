"""Each replica's own plain attributes of modules: what a forward pass leaves there, lists that a step fills, modes.

Replicas of one process take turns in the midst of a step, so an attribute of the only module there is could change
hands between its write and its read. Every replica but the leader therefore has attributes of its own: what it has
left there itself, and else copies of the leader's, made when a run starts. Code outside of runs sees the leader's.
Parameters, buffers, children and hooks are in dictionaries that all replicas share, and so is whatever is no container
and no plain tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn

from torchstrat.replicas.entries import reference_of_entry
from torchstrat.replicas.in_process.kept_attributes import KeptAttributes
from torchstrat.replicas.state import is_container, private_value

_MOST_MEMBERS = 1_000
"""Of a container: longer ones hold data, which replicas share."""

_SHARED = frozenset(vars(nn.Module())) - {"training"}
_Attributes = dict[str, Any]
_set_attributes = object.__setattr__  # a module's own asks whether it is given a parameter, a child, a buffer


class ComponentAttributes:
    """The attributes of one run after the other."""

    def __init__(self) -> None:
        self._modules: list[Any] = []  # and data classes that they hold
        self._attributes: dict[int, list[_Attributes]] = {}
        self._copies: dict[int, _Copies] = {}  # by the id of the tensor, which they refer to
        self._has_made_members = False
        self._before: list[_Attributes] | None = None
        self._kept = KeptAttributes()

    @property
    def modules(self) -> list[nn.Module]:
        return [one for one in self._modules if isinstance(one, nn.Module)]

    def begin(self, modules: Iterable[nn.Module], replicas: list[int], vectors: Container[int] = ()) -> None:
        """``replicas``: of the run, the leader first. With one there is nobody to keep apart. ``vectors``: the ``id``
        of tensors that share memory with variables, and change hands with these."""
        others = replicas[1:]
        self._attributes, self._has_made_members, self._before = {}, False, None
        self._modules = [one for one in modules if not _is_script(type(one))] if others else []
        if not self._modules:
            return
        known, found = {id(one) for one in self._modules}, []
        for one in self._modules:  # which grows
            names, data = _look_at(one, vars(one))
            found.append(names)
            for value in data:
                if id(value) not in known:
                    known.add(id(value))
                    self._modules.append(value)
        own = [vars(module) for module in self._modules]
        self._attributes[replicas[0]] = own
        left = [self._kept.take(module, replicas[0]) for module in self._modules]
        for replica in others:
            self._attributes[replica] = mine = [attributes.copy() for attributes in own]
            for attributes, names, kept in zip(mine, found, left, strict=True):
                mine_still = kept.get(replica, {})
                for name in names:
                    if name not in mine_still and id(attributes[name]) not in vectors:
                        attributes[name] = self._copy_of(attributes[name], replica, vectors)
                attributes.update(mine_still)

    def _copy_of(self, value: Any, replica: int, vectors: Container[int]) -> Any:
        if not isinstance(value, torch.Tensor):
            return private_value(value, vectors)
        key, kept = id(value), self._copies
        if key not in kept or kept[key].reference() is not value:
            kept[key] = _Copies(reference_of_entry(value, kept))
        return kept[key].of(value, replica)

    def made_members(self) -> None:
        """The replica whose turn it is registers parameters or buffers. They are made once, for all, so what it sets
        beside them (``self.is_built = True``) must not be missed by the others."""
        self._has_made_members = True

    def park(self, replica: int) -> None:
        own = self._attributes.get(replica)
        if own is None:
            return
        if self._has_made_members:
            self._has_made_members = False
            for index, attributes in enumerate(own):
                for other in self._attributes.values():
                    if other is not own:
                        _tell(other[index], attributes)

    def install(self, replica: int) -> None:
        for module, attributes in zip(self._modules, self._attributes.get(replica, ()), strict=False):
            _set_attributes(module, "__dict__", attributes)

    def begin_common(self) -> None:
        """While all replicas stand still, code runs that is for all of them, on the leader's attributes."""
        self._before = [vars(module).copy() for module in self._modules]

    def end_common(self, leader: int) -> None:
        """What that code has set is so for every replica."""
        before, self._before = self._before, None
        for index, (module, earlier) in enumerate(zip(self._modules, before or (), strict=True)):
            changed = {n: v for n, v in vars(module).items() if n not in earlier or earlier[n] is not v}
            gone = [name for name in earlier if name not in vars(module)]
            for replica, attributes in self._attributes.items():
                if replica != leader:
                    attributes[index].update({name: private_value(value) for name, value in changed.items()})
                    for name in gone:
                        attributes[index].pop(name, None)

    def end(self, leader: int) -> None:
        self.install(leader)
        others = [replica for replica in self._attributes if replica != leader]
        for index, module in enumerate(self._modules):
            self._kept.keep(module, leader, [(replica, self._attributes[replica][index]) for replica in others])
        self._modules, self._attributes, self._before = [], {}, None


class _Copies:
    """Of a plain tensor in an attribute; their memory is kept from run to run."""

    def __init__(self, reference: weakref.ref[torch.Tensor]) -> None:
        self.reference = reference
        self._copies: dict[int, torch.Tensor] = {}

    def of(self, value: torch.Tensor, replica: int) -> torch.Tensor:
        kept = self._copies.get(replica)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (value.shape, value.dtype, value.device):
            kept = self._copies[replica] = value.clone()
        else:
            kept.copy_(value)
        return kept


def _look_at(module: Any, attributes: _Attributes) -> tuple[list[str], list[Any]]:
    """The names of attributes that a step may change in place, and the data classes among them, which are kept apart as
    modules are: so they stay the objects that they are to whoever else holds them. Torch's own modules change none."""
    names: list[str] = []
    data: list[Any] = []
    if _is_of_torch(type(module)):
        return names, data
    for name, value in attributes.items():
        role = _role_of(type(value))
        if role == _COPIED and name not in _SHARED and _is_small(value):
            names.append(name)
        elif role == _DATA:
            data.append(value)
    return names, data


_COPIED, _DATA = "copied", "data"


def _find_role(kind: type[Any]) -> str | None:
    if kind is tuple or is_container(kind) or issubclass(kind, torch.Tensor):
        return _COPIED
    has_attributes = kind.__dictoffset__ and kind.__weakrefoffset__
    return _DATA if dataclasses.is_dataclass(kind) and has_attributes else None


# Of classes: every run asks.
_role_of: Callable[[type], str | None] = functools.lru_cache(1024)(_find_role)
_is_of_torch: Callable[[type], bool] = functools.lru_cache(1024)(lambda kind: kind.__module__.startswith("torch."))
_is_script: Callable[[type], bool] = functools.lru_cache(1024)(lambda kind: issubclass(kind, torch.jit.ScriptModule))


def _is_small(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and not value.requires_grad and not value.is_inference()
    return len(value) <= _MOST_MEMBERS


def _tell(others: _Attributes, own: _Attributes) -> None:
    """Give another replica what one has set: all that is new or has become a member, and other plain values."""
    for name, value in own.items():
        if name in _SHARED or others.get(name, own) is value:
            continue
        if name not in others or isinstance(value, bool | int | float | str | type(None)):
            others[name] = value
    members = [own.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")]
    for name in [name for name in others if name not in own and any(name in kind for kind in members)]:
        del others[name]  # ``self.weight = None``, which a parameter has taken the place of
