"""Data sets and samplers that say what was read of them, and the random streams that they draw from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)
    np.random.randn()  # the second of a pair of normal numbers is waiting now


def streams() -> tuple[Any, ...]:
    """Of the process: what a checkpoint keeps."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def put_streams(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def stand() -> str:
    """Where the process's streams stand, to compare."""
    return repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class Numbers(Dataset[Any]):
    """Row ``i`` is ``i``."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(index)
        return torch.tensor(index)


class Stream(IterableDataset[Any]):
    """``rows`` numbers from ``first`` on."""

    def __init__(self, rows: int, first: int = 0) -> None:
        self.rows, self.first = rows, first

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self.first, self.first + self.rows))


class Lazily(Sampler[int]):
    """Nobody's sampler, which draws from the process's streams while it is iterated."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        rest = list(range(self.length))
        while rest:
            yield rest.pop(random.randrange(len(rest)))

    def __len__(self) -> int:
        return self.length


class Eagerly(Lazily):
    """Draws when it is opened."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.length).tolist())


class Growing:
    """A batch sampler of nobody's class, by torch's stream."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        order, size = torch.randperm(self.length).tolist(), 1
        while order:
            yield [order.pop() for _ in range(min(size, len(order)))]
            size += 1


class Stateful(Sampler[int]):
    """Says and sets where it stands, and counts epochs that only it knows of."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.taken = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(self.length).tolist()
        while self.taken < self.length:
            self.taken += 1
            yield order[self.taken - 1]
        self.epoch, self.taken = self.epoch + 1, 0

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


def _by(sampler: Callable[[int], Any]) -> Callable[..., DataLoader[Any]]:
    return lambda rows, size=4, **more: DataLoader(rows, size, sampler=sampler(len(rows)), **more)


ORDERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "sequential": lambda rows, size=4, **more: DataLoader(rows, size, **more),
    "shuffle": lambda rows, size=4, **more: DataLoader(rows, size, shuffle=True, **more),
    "generator": lambda rows, size=4: DataLoader(rows, size, shuffle=True, generator=own_generator()),
    "drop_last": lambda rows, size=4: DataLoader(rows, size, shuffle=True, drop_last=True),
    "subset": _by(lambda length: SubsetRandomSampler(range(1, length - 2))),
    "weighted": _by(lambda length: WeightedRandomSampler([1.0] * 5 + [3.0] * (length - 5), 2 * length)),
    "replacement": _by(lambda length: RandomSampler(range(length), True, 4 * length, own_generator())),
    "lazy sampler": _by(Lazily),
    "eager sampler": _by(Eagerly),
    "stateful sampler": _by(Stateful),
    "batch sampler": lambda rows, size=4: DataLoader(rows, batch_sampler=Growing(len(rows))),  # type: ignore[arg-type]
}
"""Of map-style rows, in batches of a size."""
