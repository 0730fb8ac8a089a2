"""What a program is, and what its batches are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

Step = Callable[[Any], object]
Parts = dict[str, Any]
Build = Callable[[], tuple[Parts, Step] | tuple[Parts, Step, Callable[[], object]]]
"""In a strategy's scope, in float64: the modules and optimizers, the step of a replica, and what follows each run."""

ROWS = (8, 6, 5)
"""Of each global batch: even, and not."""

MODULES = (
    "tests.programs.language",
    "tests.programs.vision",
    "tests.programs.graphs",
    "tests.programs.own_code",
    "tests.programs.optimizers",
)


@dataclass(frozen=True)
class Program:
    name: str
    build: Build
    batches: Callable[[], list[Any]]
    needs: tuple[str, ...] = ()
    """Libraries."""
    by_ulp: str = ""
    """Why it is compared by what an ulp of float32 in its weights moves, and not to 1e-10."""
    rules: Mapping[str, tuple[Any, ...]] | None = None
    """How it is cut over logical devices; else it is whole on each."""


PROGRAMS: dict[str, Program] = {}


def program(*needs: str, batches: Callable[[], list[Any]], **options: Any) -> Callable[[Build], Build]:
    """Make the decorated function a program of its name."""

    def add(build: Build) -> Build:
        PROGRAMS[build.__name__] = Program(build.__name__, build, batches, needs, **options)
        return build

    return add


def load() -> Mapping[str, Program]:
    """All programs by name; importing them needs none of the libraries."""
    for module in MODULES:
        import_module(module)
    return PROGRAMS


def train(made: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """The three lines that most programs end with."""
    made.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    made.step()


# -- batches: of rows, on the first dimension of each tensor -----------------------------------------------------------


def _drawn(make: Callable[[int, torch.Generator], Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [make(rows, generator) for rows in ROWS]


def tokens(length: int = 7, vocabulary: int = 40, classes: int = 3) -> list[Any]:
    """Ids (rows, length) and a label for each row."""
    return _drawn(
        lambda n, g: (
            torch.randint(2, vocabulary, (n, length), generator=g),
            torch.randint(0, classes, (n,), generator=g),
        )
    )


def images(size: int = 32, channels: int = 3, classes: int = 5) -> list[Any]:
    """Images (rows, channels, size, size) and labels."""
    return _drawn(
        lambda n, g: (
            torch.randn(n, channels, size, size, generator=g, dtype=torch.float64),
            torch.randint(0, classes, (n,), generator=g),
        )
    )


def noised(size: int = 8, channels: int = 2) -> list[Any]:
    """Clean images, their noise, and the time of each."""
    return _drawn(
        lambda n, g: (
            torch.randn(n, channels, size, size, generator=g, dtype=torch.float64),
            torch.randn(n, channels, size, size, generator=g, dtype=torch.float64),
            torch.randint(0, 100, (n,), generator=g),
        )
    )


def vectors(features: int = 6, outputs: int = 3) -> list[Any]:
    """Inputs and targets."""
    return _drawn(
        lambda n, g: (
            torch.randn(n, features, generator=g, dtype=torch.float64),
            torch.randn(n, outputs, generator=g, dtype=torch.float64),
        )
    )


def clicks(tables: int = 3, ids: int = 20) -> list[Any]:
    """Numbers (rows, 4), ids (rows, tables, 2), and whether it was clicked."""
    return _drawn(
        lambda n, g: (
            torch.randn(n, 4, generator=g, dtype=torch.float64),
            torch.randint(0, ids, (n, tables, 2), generator=g),
            torch.randint(0, 2, (n,), generator=g).double(),
        )
    )


def nodes(count: int = 12, classes: int = 3) -> list[Any]:
    """Ids of nodes of one graph, and their labels."""
    return _drawn(
        lambda n, g: (torch.randint(0, count, (n,), generator=g), torch.randint(0, classes, (n,), generator=g))
    )
