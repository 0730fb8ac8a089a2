"""A synthetic click log: written by a seeded generator, in the format of real ones, with something in it to learn.

Nothing in it was measured. It has what makes click logs hard on an embedding table: fields of 3 to 10,000 categories
whose frequencies follow Zipf's law, so that a few rows are in every batch and most in hardly any; missing values;
integers over orders of magnitude; a quarter of positive labels. A click's probability is a logistic function of a
hidden weight for each category, of the logarithms of some integers, and of pairs of categories, which only a deep
model finds.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from torchstrat.config import require, require_positive
from torchstrat.experiments import click_logs
from torchstrat.experiments.click_rows import CATEGORIES, INTEGERS
from torchstrat.experiments.data import Examples

_VERSION = 1
"""Part of the file's name: raise it with every change of what is generated."""

_ROWS_AT_ONCE = 10_000
_ZIPF_EXPONENT = 1.1
_CLICK_LOGIT = -1.4
"""The mean logit, which gives about a quarter of clicks."""


def load(
    rows: int = 20_000,
    seed: int = 0,
    folder: str = "outputs/synthetic_clicks",
    category_rows: int = 1 << 16,
    test_fraction: float = 0.2,
) -> Examples:
    """The examples of a log of so many rows, held-out ones included, which is kept in ``folder``.

    Written first where it is not there yet. Processes may call this at the same time: each writes a file of its own and
    moves it to the place when it is whole.
    """
    require_positive("data.rows", rows)
    require(seed >= 0, f"data.seed={seed} must not be negative.")
    path = Path(folder).expanduser() / f"synthetic_clicks-v{_VERSION}-{rows}_rows-seed_{seed}.tsv"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _moved_when_whole(path) as file:
            write(file, rows, seed)
    log = click_logs.load(str(path), category_rows=category_rows, test_fraction=test_fraction)
    return replace(log, note="synthetic clicks")


@contextlib.contextmanager
def _moved_when_whole(path: Path) -> Iterator[IO[bytes]]:
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def write(file: IO[bytes], rows: int, seed: int) -> None:
    """Write ``rows`` lines. The same rows and seed give the same bytes."""
    rng = np.random.default_rng([_VERSION, seed])
    world = _draw_world(rng)
    for begin in range(0, rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - begin)
        integers, categories = _draw_integers(world, rng, count), _draw_categories(world, rng, count)
        clicked = rng.random(count) < 1 / (1 + np.exp(-_click_logits(world, integers, categories)))
        file.write(_lines(world, rng, clicked, integers, categories))


@dataclass(frozen=True)
class _World:
    """What is hidden behind a log."""

    frequencies: list[npt.NDArray[np.float64]]
    """For each field, cumulative over its categories, the most frequent one first."""
    names: list[npt.NDArray[np.bytes_]]
    """For each field, its categories' hexadecimal numbers."""
    weights: list[npt.NDArray[np.float64]]
    """For each field, its categories' parts in a click's logit."""
    tastes: list[npt.NDArray[np.float64]]
    """For the fields of a pair, ``(categories, 2)``: the pair's part is the product, summed."""
    scales: npt.NDArray[np.float64]
    """Of each integer, on a logarithmic scale."""
    slopes: npt.NDArray[np.float64]
    """Of each integer's logarithm in a click's logit."""
    missing: npt.NDArray[np.float64]
    """Of each of the 39 fields, how often it is missing."""


def _draw_world(rng: np.random.Generator) -> _World:
    sizes = np.geomspace(3, 10_000, CATEGORIES).astype(int)
    rng.shuffle(sizes)
    popularity = [1 / np.arange(1, size + 1) ** _ZIPF_EXPONENT for size in sizes]
    numbers = [rng.choice(1 << 32, size=size, replace=False) for size in sizes]
    slopes = rng.normal(scale=0.15, size=INTEGERS)
    slopes[rng.permutation(INTEGERS)[: INTEGERS // 2]] = 0.0
    return _World(
        frequencies=[np.cumsum(share) / share.sum() for share in popularity],
        names=[np.array([b"%08x" % number for number in field.tolist()]) for field in numbers],
        weights=[rng.normal(scale=0.4, size=size) for size in sizes],
        tastes=[rng.normal(scale=0.5, size=(size, 2)) for size in sizes],
        scales=rng.uniform(0.5, 3.0, size=INTEGERS),
        slopes=slopes,
        missing=rng.choice([0.0, 0.02, 0.3], p=[0.5, 0.3, 0.2], size=INTEGERS + CATEGORIES),
    )


def _draw_integers(world: _World, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    return np.floor(np.exp(rng.normal(scale=world.scales, size=(count, INTEGERS)) + 1.0)).astype(np.int64) - 1


def _draw_categories(world: _World, rng: np.random.Generator, count: int) -> list[npt.NDArray[np.int64]]:
    """For each field, the number of its category in each row."""
    return [np.searchsorted(cumulative, rng.random(count)) for cumulative in world.frequencies]


def _click_logits(
    world: _World, integers: npt.NDArray[np.int64], categories: list[npt.NDArray[np.int64]]
) -> npt.NDArray[np.float64]:
    logits = np.log1p(np.maximum(integers, 0)) @ world.slopes
    for weights, chosen in zip(world.weights, categories, strict=True):
        logits = logits + weights[chosen]
    for first in range(0, 8, 2):
        pair = (world.tastes[field][categories[field]] for field in (first, first + 1))
        logits = logits + np.prod(list(pair), axis=0).sum(axis=1)
    return np.asarray(logits - logits.mean() + _CLICK_LOGIT)


def _lines(
    world: _World,
    rng: np.random.Generator,
    clicked: npt.NDArray[np.bool_],
    integers: npt.NDArray[np.int64],
    categories: list[npt.NDArray[np.int64]],
) -> bytes:
    columns = [[b"1" if click else b"0" for click in clicked.tolist()]]
    columns += [[b"%d" % number for number in column] for column in integers.T.tolist()]
    columns += [names[chosen].tolist() for names, chosen in zip(world.names, categories, strict=True)]
    for column, rate in zip(columns[1:], world.missing, strict=True):
        for row in np.flatnonzero(rng.random(len(clicked)) < rate).tolist():
            column[row] = b""
    return b"".join(b"\t".join(fields) + b"\n" for fields in zip(*columns, strict=True))
