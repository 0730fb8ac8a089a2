"""What a module holds under other names than those of its parameters and buffers: the same tensors, and parts of them.
And a target that was made outside of the scope, and that the step reaches by something else than a name of its own.

Rows: how the module holds a buffer or a frozen parameter that the step edits; what names the target. Columns: whether
each replica has rows in every run. A cell compares with a plain loop on the global batches. Left out is what the limits
name: ``.data`` of a variable that moves into common memory when its scope closes.
"""

from __future__ import annotations

import argparse
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.matrix import places
from tests.matrix.table import Cell, Table, assert_close

PLACES = ("mirrored x2", "mirrored x3", "central_storage x2", *places.TORCHRUN, places.TPU)


class Holding(nn.Module):
    """Its forward pass reads ``held`` alone; its step edits what that is, or is a part of."""

    mean: torch.Tensor

    def __init__(self, row: str) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        self.read = ROWS[row](self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x * self.read(self))
        return y


def _attribute(module: Any) -> Any:
    module.held = module.mean
    return lambda module: module.held


def _list(module: Any) -> Any:
    module.held = [module.mean]
    return lambda module: module.held[0]


def _nest(module: Any) -> Any:
    module.held = {"means": (module.mean,)}
    return lambda module: module.held["means"][0]


def _part(module: Any) -> Any:
    module.held = module.mean[1:2]
    return lambda module: module.held


def _list_of_parts(module: Any) -> Any:
    module.held = [module.mean.data[1:2]]
    return lambda module: module.held[0]


def _list_of_frozen(module: Any) -> Any:
    module.held = [module.frozen]
    return lambda module: module.held[0]


def _data_of_frozen(module: Any) -> Any:
    module.held = [module.frozen.data]
    return lambda module: module.held[0]


ROWS: Mapping[str, Callable[[Any], Any]] = {
    "a buffer": _attribute,
    "a buffer in a list": _list,
    "a buffer in a nest": _nest,
    "a part of a buffer": _part,
    "a part of a buffer in a list": _list_of_parts,
    "a frozen parameter in a list": _list_of_frozen,
    "data of a frozen parameter": _data_of_frozen,
}


def _move(target: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(target.parameters(), model.parameters(), strict=True):
            one.mul_(0.8).add_(other, alpha=0.2)


def _by_method(target: nn.Module, model: nn.Linear, optimizer: torch.optim.Optimizer) -> Any:
    class Average:
        def look(self, x: torch.Tensor) -> Any:
            return target(x)

        def move(self) -> None:
            _move(target, model)

    return Average()


def _by_class(target: nn.Module, model: nn.Linear, optimizer: torch.optim.Optimizer) -> Any:
    class Settings:
        average = target

        @classmethod
        def look(cls, x: torch.Tensor) -> Any:
            return cls.average(x)

        @classmethod
        def move(cls) -> None:
            _move(cls.average, model)

    return Settings


def _by_namespace(target: nn.Module, model: nn.Linear, optimizer: torch.optim.Optimizer) -> Any:
    options = argparse.Namespace(target=target)
    return SimpleNamespace(look=lambda x: options.target(x), move=lambda: _move(options.target, model))


def _by_key(target: nn.Module, model: nn.Linear, optimizer: torch.optim.Optimizer) -> Any:
    pairs = {target: 1.0}
    return SimpleNamespace(look=lambda x: next(iter(pairs))(x), move=lambda: [_move(one, model) for one in pairs])


def _by_reference(target: nn.Module, model: nn.Linear, optimizer: torch.optim.Optimizer) -> Any:
    found: Any = weakref.ref(target)
    return SimpleNamespace(look=lambda x: found()(x), move=lambda: _move(found(), model))


def _by_optimizer_hook(target: nn.Module, model: nn.Linear, optimizer: torch.optim.Optimizer) -> Any:
    optimizer.register_step_post_hook(lambda *_: _move(target, model))
    return SimpleNamespace(look=lambda x: 0.0, move=lambda: None)


def _by_parameter_hook(target: nn.Module, model: nn.Linear, optimizer: torch.optim.Optimizer) -> Any:
    def move(weight: torch.Tensor) -> None:
        with torch.no_grad():
            target.weight.mul_(0.8).add_(weight, alpha=0.2)  # type: ignore[operator]

    model.weight.register_post_accumulate_grad_hook(move)
    return SimpleNamespace(look=lambda x: 0.0, move=lambda: None)


TARGETS: Mapping[str, Callable[..., Any]] = {
    "a target that a method names": _by_method,
    "a target in a class": _by_class,
    "a target in a namespace": _by_namespace,
    "a target as a key": _by_key,
    "a target behind a reference": _by_reference,
    "a target that a hook of an optimizer names": _by_optimizer_hook,
    "a target that a hook of a parameter names": _by_parameter_hook,
}
COLUMNS: Mapping[str, tuple[int, ...]] = {"rows for all": (6, 6, 6, 6), "a replica sits one out": (6, 1, 6, 6)}


def _run(strategy: Any, row: str, rows: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    if strategy is None:
        model = Holding(row)
    else:
        with strategy.scope():
            model = Holding(row)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    batches = [torch.rand(count, 3, generator=draw, dtype=torch.float64) for count in rows]

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        for _ in range(2):  # the second time with what has been edited
            model(x).square().mean().backward()
            with torch.no_grad():
                model.mean.mul_(0.9)
                model.frozen.add_(0.1)
        optimizer.step()

    for batch in batches if strategy is None else strategy.distribute_dataset(batches):
        step(batch) if strategy is None else strategy.run(step, args=(batch,))
    found = {**model.state_dict(), "read": model.read(model)}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _run_with_target(strategy: Any, row: str, rows: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with nullcontext() if strategy is None else strategy.scope():
        model = nn.Linear(3, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = copy.deepcopy(model).requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    batches = [torch.rand(count, 3, generator=draw, dtype=torch.float64) for count in rows]
    named = TARGETS[row](target, model, optimizer)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x) - named.look(x) + 0.3).square().mean().backward()
        optimizer.step()
        named.move()

    for batch in batches if strategy is None else strategy.distribute_dataset(batches):
        step(batch) if strategy is None else strategy.run(step, args=(batch,))
    found = {**model.state_dict(), **{f"target {name}": tensor for name, tensor in target.state_dict().items()}}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _check(row: str, column: str, place: str) -> None:
    run = _run if row in ROWS else _run_with_target
    with places.opened(place) as strategy:
        seen = run(strategy, row, COLUMNS[column])
    assert_close(seen, run(None, row, COLUMNS[column]))


def cells() -> Iterator[Cell]:
    for row in (*ROWS, *TARGETS):
        for column in COLUMNS:
            for place in PLACES:
                if (row, place) != ("data of a frozen parameter", "torchrun central_storage"):
                    yield Cell(row, column, place, partial(_check, row, column, place))


TABLE = Table(
    name="held",
    question="Is what a module holds under another name, or a step reaches by another, the same wherever it is read?",
    make_cells=cells,
    alike=places.launch_of,
    sampled=2,
)
