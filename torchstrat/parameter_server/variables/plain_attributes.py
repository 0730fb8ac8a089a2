"""Plain attributes of modules and of optimizers of the program's own classes, such as a dropout's ``p``: workers and
servers have what the coordinator's program has set.

Attributes travel once, with their object. What the program sets afterwards, a number, a string or a tuple of such,
travels with the settings of the next function; of anything else that it sets there is one warning.
"""

from __future__ import annotations

import functools
import operator
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchstrat._torch_private import optimizers_without_compiler
from torchstrat.parameter_server.messages import SetAttribute, SetAttributes
from torchstrat.parameter_server.serialization.plain import are_atoms, is_fixed

ATTRIBUTES = "attributes"
"""Of the settings' keys: (this, token of a module or an optimizer) → `SetAttributes`."""

_SET_BY_SCHEDULERS = ("step", "_opt_called")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    with optimizers_without_compiler():
        return frozenset((*vars(Optimizer([torch.empty(0)], {})), *_SET_BY_SCHEDULERS))


def names_of(object_: nn.Module | Optimizer) -> list[str]:
    """Attributes that are not those of every module or optimizer."""
    usual = _OF_EVERY_MODULE if isinstance(object_, nn.Module) else _of_every_optimizer()
    return [name for name in object_.__dict__ if name not in usual]


def fixed_attributes(object_: nn.Module | Optimizer) -> dict[str, Any]:
    """Those of its attributes that are numbers, strings, or tuples of such."""
    members = object_.__dict__
    return {name: members[name] for name in names_of(object_) if is_fixed(members[name])}


class _Known(NamedTuple):
    owner: weakref.ref[nn.Module | Optimizer]
    size: int
    """Of its dictionary."""
    values_of: Callable[[dict[str, Any]], Any]


class PlainAttributes:
    """Of the coordinator's modules and optimizers."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        # By identity: a variable in shards is a module, and compares as its values do.
        self._sent: MutableMapping[nn.Module | Optimizer, dict[str, Any]] = WeakIdKeyDictionary()
        self._set: MutableMapping[nn.Module | Optimizer, dict[str, SetAttribute]] = WeakIdKeyDictionary()
        self._has_warned = False

    def mark(self, owner: nn.Module | Optimizer) -> Any:
        """Equal marks of an object: nothing was set. Every call of `schedule` asks for that of every module."""
        members = owner.__dict__
        known = self._known.get(id(owner))
        if known is None or known.size != len(members) or known.owner() is not owner:
            known = self._look_at(owner)
        try:
            values = known.values_of(members)
        except KeyError:  # one was deleted, and another one set
            values = self._look_at(owner).values_of(members)
        if type(values) is not tuple:
            return None  # it has none
        return values if are_atoms(map(type, values)) else tuple([_mark_of(value) for value in values])

    def _look_at(self, owner: nn.Module | Optimizer) -> _Known:
        key, known = id(owner), self._known
        reference = weakref.ref(owner, lambda _: known.pop(key, None))
        always_there = "_is_full_backward_hook" if isinstance(owner, nn.Module) else "param_groups"
        values_of = operator.itemgetter(always_there, *names_of(owner))
        found = known[key] = _Known(reference, len(vars(owner)), values_of)
        return found

    def note(self, owner: nn.Module | Optimizer) -> None:
        """It is sent now."""
        if owner not in self._sent:
            self._sent[owner] = {name: _kept(owner.__dict__[name]) for name in names_of(owner)}

    def changed(self, owners: Iterable[tuple[Any, nn.Module | Optimizer]]) -> Mapping[Any, SetAttributes]:
        """What was set since each of these objects, with their tokens, was here first: that is when it was sent."""
        found = {}
        for token, owner in owners:
            sent = self._sent.get(owner)
            if sent is None:
                self.note(owner)
                continue
            for name in names_of(owner):
                value = owner.__dict__[name]
                if name in sent and sent[name] == _kept(value):
                    continue
                sent[name] = _kept(value)
                if is_fixed(value):
                    self._set.setdefault(owner, {})[name] = SetAttribute(time.time_ns(), value)
                elif not _is_worked_out(owner, value):
                    self._warn(owner, name)
            if owner in self._set:
                found[ATTRIBUTES, token] = dict(self._set[owner])
        return found

    def take(self, owner: Optimizer, values: Mapping[str, Any]) -> None:
        """What its steps have set, on a server. What the program has set since it was last looked at stays, and goes
        there with the next function."""
        self.note(owner)
        members, sent = owner.__dict__, self._sent[owner]
        for name, value in values.items():
            if name not in members or sent.get(name) == _kept(members[name]):
                members[name], sent[name] = value, _kept(value)

    def _warn(self, owner: nn.Module | Optimizer, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"attribute {name!r} of a {type(owner).__name__} was set on the coordinator after it had been sent to "
                "the other tasks. Numbers, strings and tuples of such follow; this is none, and they keep what they "
                "have. Give it to the function as an argument, or set it in the function. (Further ones are not "
                "warned of.)",
                stacklevel=2,
            )


def _is_worked_out(owner: nn.Module | Optimizer, value: Any) -> bool:
    """Whether it is what a hook makes anew in each forward pass, as pruning and older reparametrizations do."""
    return isinstance(value, torch.Tensor) and isinstance(owner, nn.Module) and bool(owner._forward_pre_hooks)


def _kept(value: Any) -> Any:
    """To be compared with later ones: 1 is another number than 1.0."""
    return (type(value), value) if is_fixed(value) else id(value)


def _mark_of(value: Any) -> Any:
    return value if is_fixed(value) else id(value)
