"""What workers have been sent of a module stays as it is: checks that the coordinator's program keeps to that."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchstrat.errors import UnsupportedError

_Members = tuple[tuple[str, int], ...]


class FixedStructure:
    """Remembers the parameters and children of modules when they are first sent. Weak."""

    def __init__(self) -> None:
        self._members: dict[int, tuple[weakref.ref[nn.Module], _Members]] = {}

    def check(self, modules: Iterable[nn.Module]) -> None:
        """Raise `UnsupportedError` for what would silently be another model on the workers."""
        for module in modules:
            members = _members(module)
            known = self._members.get(id(module))
            if known is not None and known[0]() is module:
                if known[1] != members:
                    _raise_changed(module, known[1], members)
                continue
            self._members[id(module)] = weakref.ref(module), members
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    check_parameter(f"{type(module).__name__}.{name}", tensor)


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


def _members(module: nn.Module) -> _Members:
    return tuple(
        (name, id(member))
        for members in (module._parameters, module._modules)
        for name, member in members.items()
        if member is not None
    )


def _raise_changed(module: nn.Module, before: _Members, now: _Members) -> None:
    changed = sorted({name for name, _ in set(before) ^ set(now)})
    raise UnsupportedError(
        f"{', '.join(changed)} of {type(module).__name__} was added, removed or replaced after the model was placed on "
        "the parameter servers; workers have it as it was. Make such changes (pruning, new heads, "
        "load_state_dict(assign=True), .to()) inside the first `with strategy.scope():`; values may change at any time."
    )
