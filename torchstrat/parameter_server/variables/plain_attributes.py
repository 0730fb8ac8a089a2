"""Plain attributes of modules, such as a dropout's ``p``: workers have what the coordinator's program has set.

Attributes travel once, with their module. What the program sets afterwards, a number, a string or a tuple of such,
travels with the settings of the next function; of anything else that it sets there is one warning.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torchstrat.parameter_server.travel.plain import are_atoms, is_fixed

ATTRIBUTES = "attributes"
"""Of the settings' keys: (this, token of a module) → what was set, by name."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Known(NamedTuple):
    module: weakref.ref[nn.Module]
    size: int
    """Of its dictionary."""
    values_of: Callable[[dict[str, Any]], Any]


class PlainAttributes:
    """Of the coordinator's modules."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        # By identity: a variable in shards is a module, and compares as its values do.
        self._sent: MutableMapping[nn.Module, dict[str, Any]] = WeakIdKeyDictionary()
        self._set: MutableMapping[nn.Module, dict[str, Any]] = WeakIdKeyDictionary()
        self._has_warned = False

    def mark(self, module: nn.Module) -> Any:
        """Equal marks of a module: nothing was set. Every call of `schedule` asks for that of every module."""
        members = module.__dict__
        known = self._known.get(id(module))
        if known is None or known.size != len(members) or known.module() is not module:
            known = self._look_at(module)
        try:
            values = known.values_of(members)
        except KeyError:  # one was deleted, and another one set
            values = self._look_at(module).values_of(members)
        if type(values) is not tuple:
            return None  # it has none
        return values if are_atoms(map(type, values)) else tuple([_mark_of(value) for value in values])

    def _look_at(self, module: nn.Module) -> _Known:
        names = _names_of(module)
        key, known = id(module), self._known
        reference = weakref.ref(module, lambda _: known.pop(key, None))
        found = known[key] = _Known(reference, len(vars(module)), operator.itemgetter("_is_full_backward_hook", *names))
        return found

    def changed(self, modules: Iterable[tuple[Any, nn.Module]]) -> Mapping[Any, Any]:
        """What was set since each of these modules, with their tokens, was here first: that is when it was sent."""
        found = {}
        for token, module in modules:
            now = {name: module.__dict__[name] for name in _names_of(module)}
            sent = self._sent.get(module)
            if sent is None:
                self._sent[module] = {name: _kept(value) for name, value in now.items()}
                continue
            for name, value in now.items():
                if name in sent and sent[name] == _kept(value):
                    continue
                sent[name] = _kept(value)
                if is_fixed(value):
                    self._set.setdefault(module, {})[name] = value
                elif not _is_worked_out(module, value):
                    self._warn(module, name)
            if module in self._set:
                found[ATTRIBUTES, token] = dict(self._set[module])
        return found

    def _warn(self, module: nn.Module, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"attribute {name!r} of a {type(module).__name__} was set on the coordinator after workers had got the "
                "module. Numbers, strings and tuples of such follow; this is none, and workers keep what they have. "
                "Give it to the function as an argument, or set it in the function. (Further ones are not warned of.)",
                stacklevel=2,
            )


def _names_of(module: nn.Module) -> list[str]:
    return [name for name in module.__dict__ if name not in _OF_EVERY_MODULE]


def _is_worked_out(module: nn.Module, value: Any) -> bool:
    """Whether it is what a hook makes anew in each forward pass, as pruning and older reparametrizations do."""
    return isinstance(value, torch.Tensor) and bool(module._forward_pre_hooks)


def _kept(value: Any) -> Any:
    """To be compared with later ones: 1 is another number than 1.0."""
    return (type(value), value) if is_fixed(value) else id(value)


def _mark_of(value: Any) -> Any:
    return value if is_fixed(value) else id(value)
