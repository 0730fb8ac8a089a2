"""A program without values: what its ``build`` makes on ``torch.device("meta")``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.ftrl import Ftrl
from torchstrat.core.memory import Sizes
from torchstrat.core.variables import VariableRegistry
from torchstrat.strategies.estimates.forward import Forward, run_without_values

MakeOptimizer = Callable[[list[torch.Tensor]], Optimizer]


class Program:
    """Modules and optimizers in the order in which they were made."""

    def __init__(self, registry: VariableRegistry, made: Any, optimizer: Optimizer | None) -> None:
        self.registry = registry
        self.optimizers = registry.optimizers()
        self._made = made, optimizer  # the registry holds nothing
        parameters = registry.tensors()
        buffers = [slot.tensor for slot in registry.buffer_slots() if slot.tensor is not None]
        if any(map(is_lazy, (*parameters, *buffers))):
            raise InvalidArgumentError("build makes lazy layers, whose sizes a first batch decides; give their sizes.")
        self.sizes = Sizes.of(parameters, buffers, self.optimizers)

    @staticmethod
    def built(build: Callable[[], Any], make_optimizer: MakeOptimizer | None) -> Program:
        """What ``build`` makes. Raises `InvalidArgumentError` where it needs values, or makes no parameters."""
        registry = VariableRegistry()
        registry.open()
        try:
            with torch.device("meta"):
                made = build()
            optimizer = None if make_optimizer is None else _optimizer(make_optimizer, registry)
        except RuntimeError as error:  # PyTorch's, of an operator that needs values
            raise InvalidArgumentError(
                f"build cannot make its model on torch.device('meta'), where tensors have no values: {error}"
            ) from error
        finally:
            registry.close()
        if not registry.tensors():
            raise InvalidArgumentError(f"build made no parameters; it returned {type(made).__name__} {made!r:.60}.")
        return Program(registry, made, optimizer)

    def forward(self, batch: Any, parts: int) -> Forward | None:
        """One of ``parts`` equal parts of ``batch`` through the model; None where there is no batch."""
        if batch is None:
            return None
        model = self._made[0]
        if not isinstance(model, nn.Module):
            raise InvalidArgumentError(
                f"batch is what the model is called with, and build returned {type(model).__name__}, not one module; "
                "leave batch out, or let build return the model alone."
            )
        return run_without_values(model, batch, parts)


def _optimizer(make: MakeOptimizer, registry: VariableRegistry) -> Optimizer:
    if registry.optimizers():
        raise InvalidArgumentError("build makes optimizers of its own; leave optimizer out.")
    made = make([one for one in registry.tensors() if one.requires_grad])
    if not isinstance(made, Optimizer):
        raise WrongTypeError(
            f"optimizer must make a torch.optim.Optimizer; it made {type(made).__name__} {made!r:.60}."
        )
    return made


def optimizer_named(name: str) -> type[Optimizer]:
    """One of torch's optimizers, or `ts.Ftrl`, by its name in letters of any case. `ValueError` lists the names."""
    classes: Mapping[str, type[Optimizer]] = {
        found.__name__.lower(): found
        for found in (*vars(torch.optim).values(), Ftrl)
        if inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer
    }
    if name.lower() not in classes:
        raise InvalidArgumentError(f"there is no optimizer {name!r}; there are {', '.join(sorted(classes))}.")
    return classes[name.lower()]
