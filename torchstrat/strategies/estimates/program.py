"""A program without values: what its ``build`` makes on ``torch.device("meta")``.

A forward pass without values: what it keeps for the backward pass, and how many rows of tables it reads.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrat.core import nest
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.core.ftrl import Ftrl
from torchstrat.core.memory import Sizes
from torchstrat.core.variables import VariableRegistry


@dataclass(frozen=True)
class Forward:
    saved_bytes: int
    """Of tensors that the backward pass needs, without parameters, buffers and the batch."""
    rows_read: dict[int, int]
    """``id`` of an embedding's weight → how many of its rows a step reads, at the most."""


def run_without_values(model: nn.Module, batch: Any, parts: int) -> Forward:
    """One of ``parts`` equal parts of ``batch``, the larger where they are uneven, through ``model``, which lives on
    ``torch.device("meta")``.

    Args:
        batch: A tensor, or a tuple of the model's arguments. Rows are along dim 0.

    Raises `InvalidArgumentError` where the model cannot be called with it.
    """
    arguments = batch if isinstance(batch, tuple) else (batch,)
    arguments = nest.map_structure(lambda leaf: _part_of(leaf, parts), arguments)
    own = {_key(one) for one in (*model.parameters(), *model.buffers(), *nest.leaves(list(arguments)))}
    kept: dict[Any, torch.UntypedStorage] = {}
    rows: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in own:
            kept[_key(tensor)] = tensor.untyped_storage()
        return tensor

    def note_rows(module: Any, called_with: tuple[Any, ...]) -> None:
        weight: torch.Tensor = module.weight
        ids = next((one.numel() for one in called_with if isinstance(one, torch.Tensor)), 0)
        rows[id(weight)] = min(rows.get(id(weight), 0) + ids, len(weight))

    handles = [
        module.register_forward_pre_hook(note_rows)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    try:
        with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the model cannot be called with this batch, without values: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return Forward(sum(storage.nbytes() for storage in kept.values()), rows)


def _key(value: Any) -> Any:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _part_of(leaf: Any, parts: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = (math.ceil(leaf.shape[0] / parts), *leaf.shape[1:]) if leaf.dim() else ()
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


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
