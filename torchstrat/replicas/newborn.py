"""Parameters that get their values during a run: lazy modules at their first call, modules first built in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchstrat.variables import VariableRegistry


class Newborn:
    """Watches for such modules and calls ``ready(module)`` right before the first forward pass that uses their values.

    On a lazy module this comes after its own hook, which makes the values.
    """

    def __init__(self, registry: VariableRegistry, ready: Callable[[nn.Module], None]) -> None:
        self._registry = registry
        self._ready = ready
        self._watched: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Newborn:
        for module in self._registry.modules():
            if any(is_lazy(parameter) for parameter in module._parameters.values() if parameter is not None):
                self._watch(module)
        self._registry.on_parameter = lambda module, _: self._watch(module)
        self._registry.open()
        return self

    def __exit__(self, *_: Any) -> None:
        self._registry.close()
        self._registry.on_parameter = None
        for handle in self._handles:
            handle.remove()

    def _watch(self, module: nn.Module) -> None:
        if id(module) in self._watched:
            return
        self._watched.add(id(module))
        done = False

        def before_forward(owner: nn.Module, inputs: Any) -> None:
            nonlocal done
            if not done and not any(is_lazy(p) for p in owner._parameters.values() if p is not None):
                done = True
                self._ready(owner)

        self._handles.append(module.register_forward_pre_hook(before_forward))


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """The module's own parameters, without those of its children."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]
