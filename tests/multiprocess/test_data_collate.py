"""Collate functions that look at the whole batch, in two processes as in plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import torchstrat as ts
from tests.support.datasets import Eagerly, Numbers, own_generator, seed
from tests.support.input_ranks import joined
from torchstrat.testing import Workers

ROWS = 14
PASSES = 2


class Ragged(Numbers):
    """Row ``i`` has a length and noise of its own."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.own = np.random.default_rng(1)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        drawn = [index + torch.rand(()).item(), random.random(), np.random.randn(), self.own.random()]
        return torch.tensor(drawn + [1.0] * (index % 5), dtype=torch.float64)


class Bulk(Ragged):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return mixed([super(Bulk, self).__getitem__(one) for one in index])


class Together(Ragged):
    """Asked for several rows at once, as data sets of Hugging Face are."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(mixed([self[index] for index in indices]))


def mixed(rows: list[torch.Tensor]) -> torch.Tensor:
    """Padded, standardised, and mixed with each other, as mixup does."""
    batch = pad_sequence(rows, batch_first=True)
    batch = torch.cat([batch - batch.mean(0), torch.full((len(rows), 1), float(batch.size(1)))], 1)
    share = np.random.beta(1, 1)
    found = share * batch + (1 - share) * batch[torch.randperm(len(rows))]
    return torch.nn.functional.pad(found, (0, 10 - found.size(1)))


def ragged(**more: Any) -> DataLoader[Any]:
    return DataLoader(Ragged(), 4, collate_fn=mixed, **more)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "collate": lambda: ragged(shuffle=True),
    "generator": lambda: ragged(shuffle=True, generator=own_generator()),
    "workers": lambda: ragged(shuffle=True, num_workers=2, multiprocessing_context="fork"),
    "bulk": lambda: DataLoader(Bulk(), batch_size=None, sampler=BatchSampler(RandomSampler(range(ROWS)), 4, False)),
    "getitems": lambda: DataLoader(Together(), 4, shuffle=True),
    "drawn": lambda: ragged(sampler=Eagerly(ROWS)),
}


def distributed(names: list[str], rank_seed: int = 0, collate: Any = "batch") -> dict[str, Any]:
    """By loader, pass and step: the rows of this process; and which it has fetched."""
    strategy = ts.MirroredStrategy(timeout=timedelta(seconds=240))
    try:
        found: dict[str, Any] = {}
        for name in names:
            seed(3 if strategy.is_chief else 3 + rank_seed)
            loader = LOADERS[name]()
            dataset = strategy.distribute_dataset(loader, ts.InputOptions(collate=collate))
            passes = [[batch.values[0].tolist() for batch in dataset] for _ in range(PASSES)]
            found[name] = passes, loader.dataset.fetched  # type: ignore[attr-defined]
        return found
    finally:
        strategy.close()


def whole(parts: list[Any], name: str) -> list[Any]:
    """By pass: the rows of both processes."""
    (first, _), (second, _) = (part[name] for part in parts)
    return [joined(map(joined, zip(*both, strict=True))) for both in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def readings(two_processes: Workers) -> list[Any]:
    return two_processes.run(distributed, list(LOADERS))


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "drawn"])
def test_batches_are_those_of_plain_pytorch(name: str, readings: list[Any]) -> None:
    seed(3)
    loader = LOADERS[name]()
    for found in whole(readings, name):
        np.testing.assert_allclose(found, joined(batch.tolist() for batch in loader), atol=1e-12)


def test_ranks_that_are_seeded_differently_read_the_same_batches(two_processes: Workers) -> None:
    parts = two_processes.run(distributed, ["collate", "workers", "drawn"], 5)
    for name in ("collate", "workers", "drawn"):
        passes = whole(parts, name)
        for batch in (np.array(rows[start : start + 4]) for rows in passes for start in range(0, ROWS, 4)):
            # Mixed with others of the same batch by the same share, the differences to the mean still cancel.
            np.testing.assert_allclose(batch[:, :4].sum(0), 0, atol=1e-9)
        assert passes[0] != passes[1]


def test_whole_batches_are_read_by_all_and_rows_on_their_own_once(two_processes: Workers, readings: list[Any]) -> None:
    assert [len(part["collate"][1]) for part in readings] == [ROWS * PASSES] * 2
    parts = two_processes.run(distributed, ["collate"], 0, "rows")
    assert sorted(joined(part["collate"][1] for part in parts)) == sorted([*range(ROWS)] * PASSES)
