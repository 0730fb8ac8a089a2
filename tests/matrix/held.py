"""What a module holds under other names than those of its parameters and buffers: the same tensors, and parts of them.

Rows: how it holds a buffer or a frozen parameter that the step edits. Columns: whether each replica has rows in every
run. A cell compares with a plain loop on the global batches. Left out is what the limits name: ``.data`` of a variable
that moves into common memory when its scope closes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
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


def _check(row: str, column: str, place: str) -> None:
    with places.opened(place) as strategy:
        seen = _run(strategy, row, COLUMNS[column])
    assert_close(seen, _run(None, row, COLUMNS[column]))


def cells() -> Iterator[Cell]:
    for row in ROWS:
        for column in COLUMNS:
            for place in PLACES:
                if (row, place) != ("data of a frozen parameter", "torchrun central_storage"):
                    yield Cell(row, column, place, partial(_check, row, column, place))


TABLE = Table(
    name="held",
    question="Is what a module holds under another name the same wherever it is read?",
    make_cells=cells,
    alike=places.launch_of,
    sampled=2,
)
