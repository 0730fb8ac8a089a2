"""What a step itself makes, on every replica: modules and leaf tensors, each with an optimizer.

Rows: what is made. Columns: what becomes of it. A cell compares with a plain loop on the global batches, on two
replicas of two rows: what is of a replica's rows alone is plainly trained on these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import torchstrat as ts
from tests.matrix import places
from tests.matrix.table import RIGHT, Cell, Expected, PlantedFault, Table, assert_close, refused
from torchstrat.core.variables import VariableRegistry
from torchstrat.errors import ReplicaDivergenceError
from torchstrat.replicas.newborn import Twins

PLACES = ("mirrored x2", "central_storage x2", *places.TORCHRUN)
Kept = dict[str, Any]


class Scaled(nn.Module):
    """A layer with a parameter and a buffer that are drawn."""

    factors: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.register_buffer("factors", 1 + torch.rand(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.factors


def _replica() -> int:
    context = ts.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


def _module(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(7 + _replica())  # of which the first one's counts, and a plain program's
    layer = Scaled()
    return layer, list(layer.parameters())


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(3)
    _ORIGINAL = Scaled()


def _copy(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """What a replica adapts to its own rows."""
    layer = copy.deepcopy(_ORIGINAL)
    return layer, list(layer.parameters())


def _leaf(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """A change of each row, as attacks on a model look for."""
    change = torch.ones(x.shape, dtype=torch.float64, requires_grad=True)
    return change.__mul__, [change]


def _shared_leaf(x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    return weight.__mul__, [weight]


def _train(layer: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        (layer(x) - 1).square().sum(dim=1).mean().backward()
        optimizer.step()


def _by_hand(layer: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Gradients that no backward pass has combined."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    gradients = torch.autograd.grad((layer(x) - 1).square().sum(dim=1).mean(), tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient * 0.5
    optimizer.step()


def _step(make: Callable[[torch.Tensor], Any], becomes: str, kept: Kept, x: torch.Tensor) -> torch.Tensor:
    if becomes != "kept" or not kept:
        layer, tensors = make(x)
        made = {"layer": layer, "optimizer": torch.optim.SGD(tensors, 0.1, momentum=0.5)}
        if becomes in ("kept", "made anew, seen from outside"):
            kept.update(made)
    else:
        made = kept
    train = _by_hand if becomes == "made anew, gradients by hand" else _train
    train(made["layer"], made["optimizer"], x)
    changed: torch.Tensor = made["layer"](x).detach()
    return changed


ROWS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "a module": _module,
    "a deep copy": _copy,
    "a leaf tensor of each row": _leaf,
    "a leaf tensor of all rows": _shared_leaf,
}
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "a module": ("made anew", "made anew, gradients by hand", "kept"),
    "a deep copy": ("made anew", "made anew, gradients by hand", "made anew, seen from outside", "kept"),
    "a leaf tensor of each row": ("made anew", "made anew, gradients by hand", "made anew, seen from outside"),
    "a leaf tensor of all rows": ("kept",),
}
"""By row: what has a meaning. A second replica does not see what the first one made anew, and keeps its own."""


def _run(strategy: Any, row: str, column: str) -> torch.Tensor:
    kept: Kept = {}
    step = partial(_step, ROWS[row], column, kept)
    draw = torch.Generator().manual_seed(0)
    batches = [torch.rand(4, 3, generator=draw, dtype=torch.float64) for _ in range(3)]
    if strategy is not None:
        found = [strategy.run(step, args=(batch,)) for batch in strategy.distribute_dataset(batches)]
        return torch.cat([strategy.gather(one, axis=0) for one in found])
    if row in ("a deep copy", "a leaf tensor of each row"):
        return torch.cat([step(half) for batch in batches for half in batch.split(2)])
    return torch.cat([step(batch) for batch in batches])


def _check(row: str, column: str, place: str) -> None:
    wanted = _run(None, row, column)
    with places.opened(place) as strategy:
        seen = _run(strategy, row, column)
    assert_close({"rows": seen}, {"rows": wanted}, 1e-12)


def _expected(row: str, column: str) -> Expected:
    if column == "kept" and row != "a module":
        says = "no variables of the strategy.*within `with strategy.scope"
        return refused(ReplicaDivergenceError, says, "is each replica's own until its optimizer is shared")
    return RIGHT


def cells() -> Iterator[Cell]:
    for row, columns in COLUMNS.items():
        for column in columns:
            for place in PLACES:
                yield Cell(row, column, place, partial(_check, row, column, place), _expected(row, column))


FAULTS = (
    PlantedFault(
        "each replica's module is its own",
        lambda: patch.object(Twins, "pair", lambda self, module, replica: []),
        ("a module | made anew | mirrored x2",),
    ),
    PlantedFault(
        "nobody notices an optimizer that a later step goes on with",
        lambda: patch.object(VariableRegistry, "note_step_of", lambda *_: None),
        ("a leaf tensor of all rows | kept | torchrun mirrored",),
    ),
)

TABLE = Table(
    name="made_in_steps",
    question="Does what a step itself makes mean what it means on one device?",
    make_cells=cells,
    faults=FAULTS,
    alike=places.carried_otherwise,
)
