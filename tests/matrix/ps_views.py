"""What shows the memory of a variable, and is no variable itself: as functions and modules have it, a view of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

Numbers = Mapping[str, torch.Tensor]
Take = Callable[[torch.Tensor], torch.Tensor]


class Normed(nn.Module):
    """Has its statistics in one buffer, and works with parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("stats", torch.ones(2, 3))
        self.double()
        self.mean, self.others = self.stats[0], {"size": [self.stats[1]]}
        self.first_row = self.layer.weight.detach()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + self.first_row.sum()
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
            self.others["size"][0].add_(y.detach().abs().mean(0))
        return (y - self.mean) / self.others["size"][0]


def _batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(4)]


def _values_of(model: nn.Module, seen: list[list[torch.Tensor]]) -> Numbers:
    found = {f"seen {turn}, {place}": one for turn, each in enumerate(seen) for place, one in enumerate(each)}
    return found | {name: value.clone() for name, value in model.state_dict().items()}


def _in_attributes(way: Any) -> Numbers:
    torch.manual_seed(0)
    with way.scope():
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return [loss.detach(), model.mean.clone(), model.first_row.clone()]

    seen = []
    for index, batch in enumerate(_batches()):
        seen.append(way.call(step, batch))
        if index == 1:
            model.mean.add_(1)
    return _values_of(model, seen)


def _in_closure(way: Any, *, take: Take, of_buffer: bool, writes: bool, is_before: bool) -> Numbers:
    torch.manual_seed(0)
    with way.scope():
        model: Any = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        variable = model[1].running_mean if of_buffer else model[0].weight
        early = take(variable)
    shown = early if is_before else take(variable)

    def step(batch: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return [loss.detach(), shown.clone()]

    def use() -> list[torch.Tensor]:
        if writes:
            shown.mul_(0.5)
        return [shown.clone()]

    seen = []
    for index, batch in enumerate(_batches()):
        seen += [way.call(step, batch), way.call(use)]
        if writes and index == 1:
            shown.add_(1)
    return _values_of(model, seen)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[1:]


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(3, -1).T[:, 1:]


_TAKEN: Mapping[str, Take] = {"detach()": _detached, ".data": _data, "a part": _part, "a part, turned": _turned}
OF_A_VARIABLE = "what shows a variable"
ROWS: Mapping[str, Mapping[str, Callable[[Any], Numbers]]] = {
    OF_A_VARIABLE: {
        "parts, in attributes": _in_attributes,
        **{
            f"of a {'buffer' if of_buffer else 'parameter'}, {name}, {'written' if writes else 'read'}": partial(
                _in_closure, take=take, of_buffer=of_buffer, writes=writes, is_before=name == "a part"
            )
            for of_buffer in (False, True)
            for name, take in _TAKEN.items()
            for writes in (False, True)
        },
    }
}
