"""Parameters, buffers, children and hooks of modules: workers have what the coordinator's program has put there.

Modules travel once. What the program adds, removes or replaces afterwards (a new head, a larger table, pruning) travels
with the settings of the next function, and is put into the same module of each worker.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.hooks import RemovableHandle

from torchstrat.errors import UnsupportedError
from torchstrat.parameter_server.messages import VariableSpec
from torchstrat.parameter_server.serialization.captured_objects import Catalog
from torchstrat.parameter_server.serialization.functions import pack

MEMBERS = "members"
"""Of the settings' keys: (this, token of a module) → `Members`."""


class Members(NamedTuple):
    """What a module has, by name and in order: variables, tokens of children, None for what is registered as None.
    ``not_saved``: names of buffers that are not in ``state_dict()``. ``hooks``: a `Packed` of its class, where that has
    changed, as parametrizations do it, and of its tables of hooks."""

    parameters: Mapping[str, VariableSpec | None]
    buffers: Mapping[str, VariableSpec | None]
    children: Mapping[str, Any]
    not_saved: frozenset[str]
    hooks: Any


class ModuleStructure:
    """Remembers what modules had when they were first sent. Weak."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[weakref.ref[nn.Module], list[Any]]] = {}
        self._changed: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        """With the marks of its hooks, and these in a `Packed`."""
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._kinds: weakref.WeakKeyDictionary[nn.Module, type] = weakref.WeakKeyDictionary()  # when they were sent
        self._other_kind: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of another class than that, or were once

    def check(self, modules: Iterable[nn.Module]) -> None:
        """Raise `UnsupportedError` for what would not be on the workers as it is here."""
        for module in modules:
            ids = _ids(module)
            known = self._sent.get(id(module))
            is_known = known is not None and known[0]() is module
            if is_known and known is not None and known[1] == ids:
                continue
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    check_parameter(f"{type(module).__name__}.{name}", tensor)
            if is_known:
                self._changed.setdefault(module, (None, None))
            if self._kinds.setdefault(module, type(module)) is not type(module):
                self._other_kind.add(module)
            self._sent[id(module)] = weakref.ref(module, partial(_forget, self._sent, id(module))), ids
            (self._hooked.add if any(_hook_marks(module)) else self._hooked.discard)(module)

    def mark(self) -> list[Any]:
        """Equal ones: no hook was registered, or removed, on any module."""
        handle: Any = RemovableHandle
        return [handle.next_id, len(self._hooked), *(mark for module in self._hooked for mark in _hook_marks(module))]

    def changed(
        self,
        catalog: Catalog,
        spec_of_buffer: Callable[[nn.Module, str], VariableSpec | None],
    ) -> Iterator[tuple[Any, Members]]:
        """The modules that have changed since they were sent, with what they have now."""
        for module, (marks, hooks) in list(self._changed.items()):
            now = [type(module), _hook_marks(module)]
            if marks != now:
                tables = {name: dict(vars(module)[name]) for name in _hook_tables(module)}
                kind = type(module) if module in self._other_kind else None
                hooks = pack((kind, tables), catalog, what=f"the hooks of {type(module).__name__}")
                self._changed[module] = now, hooks
            members = Members(
                {name: None if one is None else catalog.spec_of(one) for name, one in module._parameters.items()},
                {name: None if one is None else spec_of_buffer(module, name) for name, one in module._buffers.items()},
                {name: None if one is None else catalog.refer_to(one) for name, one in module._modules.items()},
                frozenset(module._non_persistent_buffers_set),
                hooks,
            )
            yield (MEMBERS, catalog.token_of(module)), members


def _forget(known: dict[int, Any], key: int, _: object) -> None:
    known.pop(key, None)


def check_parameter(name: str, tensor: torch.Tensor) -> None:
    """Raise `UnsupportedError` for a parameter that has no values yet, or hooks that would not be there on workers."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise UnsupportedError(
            f"{name} has no shape yet: its module is lazy. Call the model once on a small batch inside "
            "`with strategy.scope():`, so that it can be placed on the parameter servers."
        )
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise UnsupportedError(
            f"{name} has a gradient hook, which would not run on the workers: they have parameters of their own. "
            "Change the gradients between backward() and step() in the function instead."
        )


def _ids(module: nn.Module) -> list[Any]:
    """Other ones when a parameter, a child or the name of a buffer was added, removed or replaced."""
    members = [(name, id(one)) for each in (module._parameters, module._modules) for name, one in each.items()]
    return [
        *members,
        *((name, one is None) for name, one in module._buffers.items()),
        _hook_marks(module),
        id(type(module)),
    ]


def _hook_tables(module: nn.Module) -> list[str]:
    """Names of its dictionaries of hooks around forward and backward passes, and of what belongs to these."""
    return [name for name in vars(module) if name.startswith(("_forward_", "_backward_")) and "hooks" in name]


def _hook_marks(module: nn.Module) -> list[Any]:
    return [
        (name, [*table], list(map(id, table.values())))
        for name in _hook_tables(module)
        if (table := vars(module)[name])
    ]
