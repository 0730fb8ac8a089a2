"""One look at everything of the program that servers and workers have to be told of when it changes.

Nothing tells of a parameter that was written, of ``model.eval()`` or of a new learning rate, so all of it is looked at
whenever a function is scheduled. What is then done about a change takes a hundred times as long as to see that there is
none: two equal readings mean that nothing has to be done.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat.optimizer_tiers import is_listed
from torchstrat.parameter_server.serialization.plain import are_atoms, is_fixed
from torchstrat.parameter_server.variables.captured_variables import CapturedVariables
from torchstrat.parameter_server.variables.module_structure import ModuleStructure
from torchstrat.parameter_server.variables.optimizer_state import RemoteOptimizerState
from torchstrat.parameter_server.variables.plain_attributes import PlainAttributes
from torchstrat.variables import VariableRegistry

_members = operator.attrgetter("training", "_parameters", "_modules", "_buffers")


class Reading:
    """Of modules: their members, modes and plain attributes. Of variables: whether they were written, or take
    gradients. Of optimizers: parameter groups and hyperparameters, and whether their state was changed here.

    It keeps nothing of the program alive but hyperparameters. Members are told apart by id: that of a module or a
    parameter is not given to another one unnoticed, since the registry and the variables count who is there, and a
    buffer that took another one's place and id is the same variable.
    """

    def __init__(
        self,
        registry: VariableRegistry,
        variables: CapturedVariables,
        attributes: PlainAttributes,
        structure: ModuleStructure,
    ) -> None:
        population = registry.population
        self._marks: list[Any] = [torch.get_default_dtype(), *population, *variables.population]
        self._hyperparameters: list[Any] = []  # alive, so that their ids stay theirs
        self._is_comparable = True
        if any(population):
            modules = list(registry.modules())
            self._read_modules(modules)
            self._marks += map(attributes.mark, modules)
            self._marks += structure.mark()
            self._marks += variables.states()
            self._is_comparable = not variables.has_traceless_changes()
            for optimizer in registry.optimizers():
                self._read_groups(optimizer)
                if not is_listed(type(optimizer)):
                    self._marks.append(attributes.mark(optimizer))

    def is_same(self, earlier: Reading) -> bool:
        """Whether nothing has changed that this is about. False where that cannot be told."""
        return self._is_comparable and self._marks == earlier._marks

    def _read_modules(self, modules: Iterable[Any]) -> None:
        marks = self._marks
        for training, parameters, children, buffers in map(_members, modules):
            marks += (training, len(parameters), len(children), len(buffers))
            if parameters:
                marks += parameters
                marks += map(id, parameters.values())
            if children:
                marks += children
                marks += map(id, children.values())
            if buffers:
                marks += buffers
                marks += map(id, buffers.values())

    def _read_groups(self, optimizer: Optimizer) -> None:
        marks, kept = self._marks, self._hyperparameters
        state = getattr(optimizer, "state", None)
        if isinstance(state, RemoteOptimizerState):
            self._is_comparable = self._is_comparable and not state.is_changed()
        groups = optimizer.param_groups
        marks += (id(optimizer), len(groups))
        for group in groups:
            marks += group
            marks += map(id, group.values())
            marks += map(id, group["params"])
            values = [value for name, value in group.items() if name != "params"]
            kept += values
            if not are_atoms(map(type, values)) and not all(map(is_fixed, values)):
                self._is_comparable = False  # a tensor, or a list: it may change and stay the same object
