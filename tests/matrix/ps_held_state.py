"""Tensors of ``optimizer.state`` that the program has before functions run: who reads and writes them later.

One device steps in these very tensors, also in those that ``load_state_dict`` was given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

Numbers = Mapping[str, torch.Tensor]
Edit = Callable[[torch.Tensor], object]


def _in_place(tensor: torch.Tensor) -> None:
    tensor.mul_(0.5)


def _through_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(0.5)


def _through_array(tensor: torch.Tensor) -> None:
    array = tensor.numpy()
    array *= 0.5


def _read(tensor: torch.Tensor) -> None:
    pass


class _Job:
    """One model, its optimizer and steps of it."""

    def __init__(self, way: Any, make: Callable[..., Any]) -> None:
        with way.scope():
            torch.manual_seed(0)
            self.model = nn.Linear(4, 3).double()
            self.optimizer = make(self.model.parameters(), lr=0.1)
        self._way, self.seen = way, dict[str, torch.Tensor]()
        self._draw = torch.Generator().manual_seed(1)

    def train(self, steps: int = 2, *, joins: bool = True) -> None:
        model, optimizer = self.model, self.optimizer

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        for _ in range(steps):
            self._way.call(step, torch.randn(3, 4, generator=self._draw, dtype=torch.float64))
        if joins:
            self._way.join()

    def note(self, **tensors: torch.Tensor) -> None:
        place = len(self.seen)
        for name, value in {**self.model.state_dict(), **tensors}.items():
            self.seen[f"{place} {name}"] = value.detach().clone()

    def state(self) -> list[torch.Tensor]:
        entries = [self.optimizer.state[p] for p in self.model.parameters()]
        return [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]


def held(way: Any, *, edit: Edit, make: Callable[..., Any], reads: bool = False, early: bool = False) -> Numbers:
    """The tensors are taken once, or ``early`` arrays of them; ``reads``: the program looks at the state."""
    job = _Job(way, make)
    job.train()
    taken = job.state()
    arrays = [tensor.numpy() for tensor in taken] if early else []
    for _ in range(2):
        job.train()
        if reads:
            job.optimizer.state_dict()
        for place, tensor in enumerate(taken):
            if early:
                tensor.detach()  # in the array is what was read last
                job.model.state_dict()
                arrays[place] *= 0.5
            else:
                edit(tensor)
        job.note(**{f"taken {place}": tensor for place, tensor in enumerate(taken)})
    job.train()
    job.note(**{f"taken {place}": tensor for place, tensor in enumerate(taken)})
    return job.seen


def views(way: Any, *, make: Callable[..., Any]) -> Numbers:
    """What shows parts of their memory is read and written."""
    job = _Job(way, make)
    job.train()
    parts = [tensor.detach().reshape(-1)[:2] for tensor in job.state()]
    for _ in range(2):
        job.train()
        for part in parts:
            part.mul_(0.5)
            job.note(part=part)
    job.train()
    job.note(**{f"part {place}": part for place, part in enumerate(parts)})
    return job.seen


def loaded(way: Any, *, make: Callable[..., Any], copies: bool = False, again: bool = False) -> Numbers:
    """A snapshot is loaded, and is what steps go on from; then looked at, perhaps loaded ``again``."""
    job = _Job(way, make)
    job.train()
    snapshot = copy.deepcopy(job.optimizer.state_dict())
    job.train()
    given = copy.deepcopy(snapshot) if copies else snapshot
    job.optimizer.load_state_dict(given)
    for turn in range(3):
        job.train()
        if again:
            job.optimizer.load_state_dict(copy.deepcopy(snapshot) if copies else snapshot)
        if turn == 1:
            _tensors_of(given)[0].data.mul_(0.5)
        job.note(**{f"given {place}": value for place, value in enumerate(_tensors_of(snapshot))})
    job.train()
    job.note()
    return job.seen


def live(way: Any, *, make: Callable[..., Any]) -> Numbers:
    """What ``state_dict()`` gives is no copy, either."""
    job = _Job(way, make)
    job.train()
    snapshot = job.optimizer.state_dict()
    job.train()
    job.note(**{f"snapshot {place}": value for place, value in enumerate(_tensors_of(snapshot))})
    job.optimizer.load_state_dict(snapshot)
    job.train()
    job.note(**{f"snapshot {place}": value for place, value in enumerate(_tensors_of(snapshot))})
    return job.seen


def mixed(way: Any, *, make: Callable[..., Any]) -> Numbers:
    """Calls with parameters and state among their arguments."""
    job = _Job(way, make)
    job.train()
    taken, weight = job.state()[-2:], [*job.model.parameters()]
    job.train()
    with torch.no_grad():
        for tensor, parameter in zip(taken, weight, strict=True):
            if tensor.shape == parameter.shape:
                parameter.add_(tensor, alpha=0.1)
                tensor.add_(parameter, alpha=0.1)
                tensor.data += parameter
    job.note(sum=sum(tensor.sum() + parameter.sum() for tensor, parameter in zip(taken, weight, strict=True)))
    job.train()
    job.note(**{f"taken {place}": tensor for place, tensor in enumerate(taken)})
    return job.seen


def _tensors_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    entries = state["state"].values()
    return [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]


MOMENTUM = partial(torch.optim.SGD, momentum=0.9)
_EDITS: Mapping[str, Edit] = {
    "read": _read,
    "written in place": _in_place,
    "written through .data": _through_data,
    "written as an array": _through_array,
}
ROW = "a tensor of optimizer state that the program holds"
ROWS: Mapping[str, Mapping[str, Callable[[Any], Numbers]]] = {
    ROW: {
        **{name: partial(held, edit=edit, make=MOMENTUM) for name, edit in _EDITS.items()},
        **{f"{name}, Adam": partial(held, edit=edit, make=torch.optim.Adam) for name, edit in _EDITS.items()},
        "written after a state_dict()": partial(held, edit=_through_data, make=MOMENTUM, reads=True),
        "written by an array that is held, too": partial(held, edit=_read, make=MOMENTUM, early=True),
        "parts of it": partial(views, make=MOMENTUM),
        "with parameters": partial(mixed, make=MOMENTUM),
        "from state_dict()": partial(live, make=torch.optim.Adam),
        "given to load_state_dict": partial(loaded, make=MOMENTUM),
        "given to load_state_dict, Adam": partial(loaded, make=torch.optim.Adam),
        "given to load_state_dict twice": partial(loaded, make=MOMENTUM, again=True),
        "given to load_state_dict, copied": partial(loaded, make=MOMENTUM, copies=True, again=True),
    },
}
