"""Modules that come into being during a run: lazy ones at their first call, those first built or copied in a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchstrat.variables import VariableRegistry


class Newborn:
    """Watches for such modules in one run after the other.

    ``ready(module)`` is called right before the first forward pass that uses the values of its variables; on a lazy
    module this comes after its own hook, which makes the values. ``used(module)`` is called before this and every other
    forward pass, ``named(module, name, member)`` before a parameter or buffer is registered in any module;
    ``on_new`` likewise, of tensors under a name that a module which was there when the run began does not have yet.
    """

    def __init__(
        self,
        registry: VariableRegistry,
        ready: Callable[[nn.Module], None],
        used: Callable[[nn.Module], None] | None = None,
        named: Callable[[nn.Module, str, Any], None] | None = None,
        on_new: Callable[[nn.Module, str, torch.Tensor], None] | None = None,
    ) -> None:
        self._registry = registry
        self._ready = ready
        self._used = used
        self._named = named
        self._on_new = on_new
        self._modules: Sequence[nn.Module] = ()
        self._watched: set[int] = set()
        self._handles: list[Any] = []

    def begin(self, modules: Sequence[nn.Module], *, has_lazy: bool) -> None:
        """A run begins. ``has_lazy``: some of the ``modules`` have lazy parameters."""
        self._modules = modules
        for module in modules if has_lazy else ():
            if any(is_lazy(parameter) for parameter in module._parameters.values() if parameter is not None):
                self.watch(module)
        self._registry.on_member, self._registry.is_in_step = self._on_member, True
        self._registry.open(classes=self._registry.may_create)

    def end(self) -> None:
        self._registry.close()
        self._registry.on_member, self._registry.is_in_step = None, False
        self._modules = ()
        if self._watched:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._watched.clear()

    def _on_member(self, module: nn.Module, name: str, member: Any) -> None:
        if isinstance(member, torch.Tensor):
            if self._named is not None:
                self._named(module, name, member)
            is_new = name not in module._buffers and name not in module._parameters
            if self._on_new is not None and is_new and any(module is one for one in self._modules):
                self._on_new(module, name, member)
            if member.requires_grad or self._named is not None:
                self.watch(module)

    def watch(self, module: nn.Module) -> None:
        if id(module) not in self._watched:
            self._watched.add(id(module))
            self._handles.append(module.register_forward_pre_hook(_BeforeForward(self)))

    def before_forward(self, module: nn.Module, *, is_first: bool) -> bool:
        """Whether the module's variables have their values by now."""
        if not self._handles or any(is_lazy(p) for p in module._parameters.values() if p is not None):
            return False
        if is_first:
            self._ready(module)
        if self._used is not None:
            self._used(module)
        return True


class _BeforeForward:
    """The hook. A deep copy of its module gets one that does nothing: the run knows of the copy otherwise."""

    def __init__(self, newborn: Newborn | None) -> None:
        self._newborn = (lambda: None) if newborn is None else weakref.ref(newborn)
        self._is_done = False

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        newborn = self._newborn()
        if newborn is not None:
            self._is_done = newborn.before_forward(module, is_first=not self._is_done) or self._is_done

    def __deepcopy__(self, memo: Any) -> _BeforeForward:
        return _BeforeForward(None)


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """The module's own parameters, without those of its children."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]
